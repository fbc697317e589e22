"""Everything on an object store: training and its checkpoints, resumption, evaluation, export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from recmill.artifacts import Checkpoint, Dataset, InputError
from recmill.training.checkpoint import newest_checkpoint
from recmill.training.config import TrainConfig
from recmill.training.serving import evaluate_checkpoint
from recmill.training.trainer import train
from tests.damage.workspace import _launch_here as launch_here
from tests.datasets import write_dataset
from tests.object_store import s3_bucket

CONFIG = TrainConfig(batch_size=64, max_steps=12, bottom_layers=(8,), top_layers=(8,), checkpoint_every=3, threads=1)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset")


def losses(result: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in result["curve"]]


def names_in(url: str) -> set[str]:
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return {path.removeprefix(root + "/") for path in filesystem.find(root)}


def test_a_run_in_a_bucket_is_a_run_on_disk(bucket: str, dataset: Dataset, tmp_path: Path) -> None:
    remote = train(dataset.path, out=f"{bucket}/run", config=CONFIG, launcher=launch_here)
    local = train(dataset.path, out=tmp_path / "run", config=CONFIG, launcher=launch_here)
    assert losses(remote) == losses(local)
    assert remote["metrics"] == local["metrics"]
    assert remote["saving"]["num_copied"] == 4
    # Nothing is left of step checkpoints, and the model is the same.
    names = names_in(f"{bucket}/run")
    assert {name for name in names if "/" in name} == {
        f"checkpoint/{name}" for name in ("checkpoint.json", "rank-00000.safetensors", "tensors.json")
    }
    models = [Checkpoint.load(f"{place}/checkpoint", verify=True) for place in (f"{bucket}/run", tmp_path / "run")]
    assert models[0].files == models[1].files
    evaluated = evaluate_checkpoint(f"{bucket}/run/checkpoint", dataset.path)
    assert evaluated["metrics"] == evaluate_checkpoint(tmp_path / "run" / "checkpoint", dataset.path)["metrics"]
    # The same call again has nothing to do; a taken folder is not written to.
    assert train(dataset.path, out=f"{bucket}/run", config=CONFIG)["curve"] == remote["curve"]
    with pytest.raises(InputError, match="with other settings"):
        train(dataset.path, out=f"{bucket}/run", config=replace(CONFIG, seed=1))


def test_a_save_without_manifest_is_no_checkpoint(bucket: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(f"{bucket}/half/checkpoints")
    for name in ("step-00000003/checkpoint.json", "step-00000006/rank-00000.safetensors"):
        filesystem.pipe_file(f"{root}/{name}", b"{}")
    assert newest_checkpoint(f"{bucket}/half/checkpoints") == f"{bucket}/half/checkpoints/step-00000003"
    assert newest_checkpoint(f"{bucket}/none/checkpoints") is None


def test_a_store_that_is_away_is_one_sentence(bucket: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(out: str) -> str:
        with pytest.raises(InputError) as raised:
            train(dataset.path, out=out, config=CONFIG, launcher=launch_here)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "The specified bucket does not exist" in attempt("s3://no-such-bucket-here/run")
    monkeypatch.setenv("RECMILL_STORE_ATTEMPTS", "1")
    monkeypatch.setattr(
        "recmill.artifacts.places.stores.open_store", lambda url: (_ for _ in ()).throw(TimeoutError("no answer"))
    )
    assert attempt(f"{bucket}/other") == f"{bucket}/other: cannot be read, tried once (TimeoutError: no answer)"


def start(dataset: Dataset, out: str) -> subprocess.Popen[str]:
    settings = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "recmill", "train", dataset.path, "--out", out, "--nproc", "2", *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


SETTINGS = {"batch_size": 64, "epochs": 2, "bottom_layers": 8, "top_layers": 8, "checkpoint_every": 2, "threads": 1}


@pytest.mark.slow
@pytest.mark.timeout(5400)  # on a busy machine
def test_a_run_in_a_bucket_resumes_after_every_kill(bucket: str, dataset: Dataset, tmp_path: Path) -> None:
    expected = start(dataset, str(tmp_path / "expected"))
    assert expected.wait(900) == 0
    for kills in range(4):
        process = start(dataset, f"{bucket}/killed")
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline and process.poll() is None:
            steps = {name.split("/")[0] for name in names_in(f"{bucket}/killed/checkpoints")}
            if any(name >= f"step-{4 + 8 * kills:08d}" for name in steps):  # being saved or complete
                break
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for victim in family if kills % 2 else family[-1:]:
            with suppress(psutil.NoSuchProcess):
                os.kill(victim.pid, signal.SIGKILL)
        process.communicate(timeout=600)
        assert process.returncode != 0
    final = start(dataset, f"{bucket}/killed")
    _, said = final.communicate(timeout=900)
    assert final.returncode == 0, said
    with fsspec.open(f"{bucket}/killed/result.json") as file:
        found = json.load(file)
    whole = json.loads((tmp_path / "expected" / "result.json").read_text())
    assert losses(found) == losses(whole)
    assert found["metrics"] == whole["metrics"]
