"""Trainings that several tests compare: the same data and settings in one pod, and in several."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.deployment import TestSite

# Enough steps that there is time to kill a pod between two checkpoints.
STEPS = 400
SETTINGS = (
    "batch_size=256",
    "bottom_layers=16",
    "top_layers=16",
    "epochs=1000",
    f"max_steps={STEPS}",
    "checkpoint_every=20",
    "eval_every=100000",
    "threads=1",
    "dedup=true",  # nothing depends on a trial's timings
    "tuning=false",
)


def train_command(data: str, out: str, *settings: str) -> str:
    flags = " ".join(f"--set {setting}" for setting in (*SETTINGS, *settings))
    return f"recmill train {data} --out {out} --json {flags}"


def result_of(site: TestSite, name: str, out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.shell(name, f"cat {out}/result.json"))
    return found


def losses(result: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in result["curve"]]
