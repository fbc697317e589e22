"""The run folders of a comparison, found by the checkpoints that trainings published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recmill.artifacts import InputError, join_path, read_checked_json
from recmill.training.switches import ablation_variants

CHECKPOINT = "/train/checkpoint"
ORDER = [variant.name for variant in ablation_variants()]  # others follow by name


def order_runs(checkpoints: Sequence[str]) -> list[str]:
    """The folders of the runs, the baseline first. Parallel tasks end in any order."""
    for path in checkpoints:
        if not path.endswith(CHECKPOINT):
            raise InputError(f"{path}: expected the checkpoint of a run, RUN{CHECKPOINT}")
    runs = [path.removesuffix(CHECKPOINT) for path in checkpoints]
    return sorted(runs, key=lambda run: (ORDER.index(_name(run)) if _name(run) in ORDER else len(ORDER), run))


def result_rows(runs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each run by its name, and how much faster than the first it trained."""
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        result = read_checked_json(join_path(run, "train/result.json"))
        first = next(iter(rows.values()), None)
        rows[_name(run)] = {
            "samples_per_s": result["samples_per_s"],
            "speedup": result["samples_per_s"] / first["samples_per_s"] if first else 1.0,
            "auc": result["metrics"]["auc"],
            "log_loss": result["metrics"]["log_loss"],
            "peak_memory_bytes": result["peak_memory_bytes"],
            "embedding_bytes": result["model"]["embedding_bytes"],
        }
    return rows


def _name(run: str) -> str:
    return run.rstrip("/").rsplit("/", 1)[-1]
