"""Tensors of checkpoints: safetensors files that any reader opens, with damage seen and no code inside."""

from __future__ import annotations

import json
import os
import pickle
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recmill.artifacts import Checkpoint, InputError, tensors
from recmill.model.stores.disk.rows import RowBlocks
from recmill.training.tensors import storage
from recmill.training.tensors.conversion import convert_checkpoint
from recmill.training.tensors.storage import INDEX_FILE, load_tensors, save_tensors
from tests.old_checkpoints import write_old

SHAPES: dict[str, Any] = {
    "table": torch.arange(200.0 * 4).view(200, 4),
    "half": torch.randn(3, 5).bfloat16(),
    "step": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
    "rng": torch.arange(50, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "strided": torch.arange(18.0).view(2, 9)[1:, 3:4],
}


def empty() -> dict[str, Any]:
    return {"state": {name: torch.zeros_like(value) for name, value in SHAPES.items()}}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table in blocks of 64 rows, checksums per 256 bytes, read 1000 bytes at a time."""
    monkeypatch.setattr("recmill.model.stores.disk.rows.BLOCK_ROWS", 64)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 256)
    monkeypatch.setattr(storage, "READ_BYTES", 1000)
    state = {"state": {**SHAPES, "table": SHAPES["table"].as_subclass(RowBlocks)}}
    save_tensors(state, tmp_path, no_dist=True)
    return tmp_path


def test_what_was_saved_is_loaded(saved: Path) -> None:
    state = empty()
    load_tensors(state, saved, no_dist=True)
    for name, value in SHAPES.items():
        assert torch.equal(state["state"][name], value), name


def test_files_are_what_the_format_says(saved: Path) -> None:
    """Read by hand from the description of the format, not by our reader."""
    data = (saved / "rank-00000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert length % 8 == 0
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert (ends[0][0], ends[-1][1]) == (0, len(body))
    assert all(one[1] == other[0] for one, other in pairwise(ends))
    assert (header["state.half"]["dtype"], header["state.step"]["shape"]) == ("BF16", [])
    blocks = [header[f"state.table{at}"] for at in ("", "@64,0", "@128,0", "@192,0")]
    rows = [np.frombuffer(body[slice(*block["data_offsets"])], np.float32).reshape(block["shape"]) for block in blocks]
    assert (np.concatenate(rows) == SHAPES["table"].numpy()).all()


def test_every_flipped_byte_of_a_tensor_is_seen(saved: Path) -> None:
    path = saved / "rank-00000.safetensors"
    before = path.read_bytes()
    start = 8 + int.from_bytes(before[:8], "little")
    for place in range(start, len(before), 37):
        path.write_bytes(before[:place] + bytes([before[place] ^ 4]) + before[place + 1 :])
        with pytest.raises(InputError, match=r"rank-00000\.safetensors: is damaged"):
            load_tensors(empty(), saved, no_dist=True)
    path.write_bytes(before[:-1])
    with pytest.raises(InputError, match="outside its file"):
        load_tensors(empty(), saved, no_dist=True)
    path.unlink()
    with pytest.raises(InputError, match="outside its file"):
        load_tensors(empty(), saved, no_dist=True)


def test_an_index_that_lies_is_refused(saved: Path, tmp_path: Path) -> None:
    path = saved / INDEX_FILE
    index = json.loads(path.read_text())
    (tmp_path / "secret").write_bytes(bytes(10_000))
    for change, message in (
        ({"file": "../secret"}, "outside its file"),
        ({"file": str(tmp_path / "secret")}, "outside its file"),
        ({"begin": 10**9}, "outside its file"),
        ({"offset": [150, 0]}, "outside the tensor"),
        ({"shape": [10**12, 4]}, "outside the tensor"),
        ({"crc32": []}, "is damaged"),
        ({"begin": -1}, "expected a whole number"),
    ):
        hostile = json.loads(path.read_text())
        hostile["tensors"]["state.table"]["parts"][0] |= change
        path.write_text(json.dumps(hostile))
        with pytest.raises(InputError, match=message):
            load_tensors(empty(), saved, no_dist=True)
        path.write_text(json.dumps(index))
    index["tensors"]["state.table"]["dtype"] = "PICKLE"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match="dtype 'PICKLE'"):
        load_tensors(empty(), saved, no_dist=True)


def test_a_missing_or_misshapen_tensor_is_one_sentence(saved: Path) -> None:
    for state in ({"state": {"other": torch.zeros(3)}}, {"state": {"table": torch.zeros(7, 4)}}):
        with pytest.raises(InputError, match="is not a checkpoint of this model") as raised:
            load_tensors(state, saved, no_dist=True)
        assert "\n" not in str(raised.value)


def test_only_tensors_are_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="checkpoints hold tensors only"):
        save_tensors({"state": {"config": object()}}, tmp_path, no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_old_checkpoints_convert(tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", SHAPES)
    with pytest.raises(InputError, match="convert it: recmill convert-checkpoint"):
        load_tensors(empty(), old, no_dist=True)
    new = convert_checkpoint(old, out=tmp_path / "new")
    assert (new.step, new.config, new.inputs) == (3, {"a": 1}, {"dataset": "sha256:0"})
    state = empty()
    load_tensors(state, tmp_path / "new", no_dist=True)
    assert all(torch.equal(state["state"][name], value) for name, value in SHAPES.items())
    with pytest.raises(InputError, match="nothing to convert"):
        convert_checkpoint(tmp_path / "new", out=tmp_path / "again")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/recmill-was-here",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_no_code_of_an_old_checkpoint_runs(tmp_path: Path, file: str) -> None:
    old = write_old(tmp_path / "old", SHAPES)
    (old / file).write_bytes(pickle.dumps(Hostile()))
    manifest = json.loads((old / "checkpoint.json").read_text())
    (old / "checkpoint.json").unlink()
    Checkpoint.of_json({k: manifest[k] for k in ("step", "config", "schema", "world_size")}).seal(old)
    with pytest.raises(InputError, match=r"cannot be read"):
        convert_checkpoint(old, out=tmp_path / "new")
    assert not Path("/tmp/recmill-was-here").exists()
