"""Changes around a real training run, which `tuning=true` follows while it trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import write_dataset

ROOT = Path(__file__).parents[3]


def train_through_events(data, out, tuning):
    script = str(Path(__file__).with_name("events_rank.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, script, data, str(out), tuning], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "events.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a process with one core has none to lose")
def test_a_training_run_follows_what_changes_around_it(tmp_path):
    data = write_dataset(tmp_path / "data", rows=(("train", 4096), ("test", 256)), rows_per_group=64).path
    found = train_through_events(data, tmp_path / "tuned", "true")
    events = " | ".join(entry["event"] for entry in found["tuning"] if entry["event"])
    for what in ("the trainer takes 0.", "read takes ", "cores 2 to 1", "memory limit "):
        assert what in events, what
    plain, slow_trainer, slow_storage, one_core, little_memory = found["phases"]
    assert slow_storage["workers"]["read"] > slow_trainer["workers"]["read"]
    assert one_core["limit_bytes"] == plain["limit_bytes"]
    assert little_memory["limit_bytes"] < 4 * found["least_bytes"]
    assert not any("tuning stopped" in (entry["event"] or "") for entry in found["tuning"])
    fixed = train_through_events(data, tmp_path / "fixed", "false")
    assert found["losses"] == fixed["losses"], "what is tuned changes no batch"
    assert fixed["tuning"] == []
