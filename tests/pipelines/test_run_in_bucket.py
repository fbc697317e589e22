"""`recmill run --out s3://...`: a run whose folder is in a store is a run on disk, also after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from recmill.artifacts import Checkpoint, Dataset, path_exists
from tests.object_store import s3_bucket

SETTINGS = {"data.sessions": 120, "batch_size": 64, "max_steps": 8, "checkpoint_every": 2, "threads": 1}
SETTINGS |= {"bottom_layers": 8, "top_layers": 8, "trial": "false"}
MOMENTS = ("dataset/schema.json", "train/job.json")  # the run is killed when these are there


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


def start(out: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recmill", "run", "--preset", "tiny", "--no-baseline", "--out", out, "--json"]
    command += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, said = process.communicate(timeout=1800)
    assert process.returncode == 0, said
    return json.loads(out)


def kill_when(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + 1800
    while not path_exists(url):
        assert process.poll() is None, url
        assert time.monotonic() < deadline, url
        time.sleep(0.1)
    for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            os.kill(victim.pid, signal.SIGKILL)
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_in_a_bucket_is_a_run_on_disk_after_every_kill(bucket: str, tmp_path: Path) -> None:
    out = f"{bucket}/runs/one"
    for moment in MOMENTS:
        kill_when(start(out, tmp_path), f"{out}/{moment}")
    found = finish(start(out, tmp_path))
    expected = finish(start(str(tmp_path / "runs/expected"), tmp_path))
    places = [out, str(tmp_path / "runs/expected")]
    curves = []
    for place in places:
        with fsspec.open(f"{place}/train/result.json") as file:
            curves.append([(entry["step"], entry["loss"]) for entry in json.load(file)["curve"]])
    assert curves[0] == curves[1]
    hashes = [Dataset.load(f"{place}/dataset", verify=True).content_hash for place in places]
    assert hashes[0] == hashes[1]
    models = [Checkpoint.load(f"{place}/train/checkpoint", verify=True) for place in places]
    assert [entry.sha256 for entry in models[0].files if entry.name.endswith(".safetensors")] == [
        entry.sha256 for entry in models[1].files if entry.name.endswith(".safetensors")
    ]
    # What people look at is there, too; MLflow's database stays on this machine, where runs on disk have it.
    assert found["report"] == f"{out}/report.html"
    for name in ("report.html", "run.log", "run.json", "model/signature.json"):
        assert path_exists(f"{out}/{name}"), name
    assert (
        found["mlflow"]["tracking_uri"] == expected["mlflow"]["tracking_uri"] == f"sqlite:///{tmp_path}/runs/mlflow.db"
    )
