"""Saving beside training: the same bytes as saving at once, one save at a time, and failures that are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recmill.artifacts import InputError
from recmill.training.tensors import saving
from recmill.training.tensors.saving import Saver
from recmill.training.tensors.storage import load_tensors


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of() -> dict[str, Any]:
    torch.manual_seed(3)
    whole = torch.randn(100, 16)
    return {"tables": {"a": whole[:, :8], "b": torch.randn(7, 3)}, "step": torch.tensor(4.0), "none": torch.zeros(0, 2)}


def save(saver: Saver, folder: Path, state: dict[str, Any], hold: threading.Event | None = None) -> None:
    def finish(writer: Any, written: Any) -> None:
        if hold is not None:
            hold.wait(20)
        writer.save_index(written, folder)
        (folder / "done").write_text("".join(own.entry.sha256 for own in written))

    folder.mkdir()
    saver.save(lambda: state, folder, finish=finish)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_is_written_as_it_was_byte_for_byte(tmp_path: Path) -> None:
    state, hold = state_of(), threading.Event()
    save(at_once := Saver("false"), tmp_path / "at once", state_of())
    save(beside := Saver("true"), tmp_path / "beside", state, hold)
    state["tables"]["a"].zero_()  # training goes on
    assert not (tmp_path / "beside" / "done").exists()
    hold.set()
    beside.wait()
    assert content(tmp_path / "beside") == content(tmp_path / "at once")
    assert (at_once.times.num_copied, beside.times.num_copied) == (0, 1)
    loaded = {"tables": {"a": torch.empty(100, 8)}}
    load_tensors(loaded, tmp_path / "beside", no_dist=True)
    assert torch.equal(loaded["tables"]["a"], state_of()["tables"]["a"])


def test_there_is_one_save_at_a_time(tmp_path: Path) -> None:
    saver, hold = Saver("true"), threading.Event()
    save(saver, tmp_path / "first", state_of(), hold)
    threading.Timer(0.2, hold.set).start()
    save(saver, tmp_path / "second", state_of())
    assert (tmp_path / "first" / "done").exists()
    saver.close()
    assert (tmp_path / "second" / "done").exists()
    assert saver.times.wait_seconds > 0.1


@pytest.mark.parametrize("mode", ["true", "false"])
def test_a_save_that_fails_ends_the_run(tmp_path: Path, mode: str) -> None:
    saver = Saver(mode)

    def finish(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def attempt() -> None:
        saver.save(state_of, tmp_path, finish=finish)
        saver.wait()

    with pytest.raises(InputError, match="cannot be written: the disk is full"):
        attempt()
    with pytest.raises(InputError, match="the disk is full"):  # and no later one hides it
        saver.check()


def test_auto_copies_what_fits_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(roomy := Saver("auto"), tmp_path / "roomy", state_of())
    roomy.close()
    monkeypatch.setattr(saving, "available_memory_bytes", lambda: 1000)
    save(full := Saver("auto"), tmp_path / "full", state_of())
    assert (roomy.times.num_copied, full.times.num_copied) == (1, 0)
    assert content(tmp_path / "roomy") == content(tmp_path / "full")
