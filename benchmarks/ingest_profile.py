"""Where the CPU time of a row goes in ingestion: our engine beside a plain loop and Grain over the same functions.

    python benchmarks/ingest_profile.py [--quick] [--json PATH|-] [--seed K]

cpu_SIDE      CPU microseconds per row of all threads, user and system; the note has page faults and context switches
              per 1,000 rows and, for our engine, the CPU time of each stage
wall_SIDE     microseconds per row from the first read to the last batch

SIDE is loop (one thread), grain (2 threads), ours (one worker per stage), ours_in_order (the same without mixing: how
much do batches from many row groups cost?) or ours_crowded (8 workers per stage). All decode with our kernel. CPU time
tells work (copies, cold caches, faults) from waiting (wake-ups, the GIL): a side whose wall time is above its share of
CPU time waits.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # as in `recmill train`

import torch
from harness import parse_options, plain_value, say, warn_if_busy
from intune_data import write_dataset
from intune_live import open_pipeline
from intune_peers import grain, plain_loop
from parts import Found, Parts

from recmill.artifacts import Dataset
from recmill.data.ingest import STAGES

BATCH_SIZE, ROWS_PER_GROUP = 4096, 8192
Run = Callable[[], dict[str, Any]]  # reads all epochs; returns statistics of stages, if it has any


def read_peer(loader: Any, dataset: Dataset, threads: int, epochs: int) -> dict[str, Any]:
    for _ in loader(dataset, BATCH_SIZE, threads, epochs, True):
        pass
    return {}


def read_ours(dataset: Dataset, epochs: int, *, workers: int = 1, shuffle: bool = True) -> dict[str, Any]:
    counts = dict.fromkeys(STAGES, workers)
    with open_pipeline(dataset, batch_size=BATCH_SIZE, epochs=epochs, workers=counts, shuffle=shuffle) as pipeline:
        for _ in pipeline:
            pass
        return pipeline.stats()


def measure(run: Run, num_rows: int) -> dict[str, Any]:
    """Per row: CPU and wall microseconds; per 1,000 rows: faults and switches; CPU microseconds per row by stage."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    stats = run()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    used = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    counts = {"faults": "ru_minflt", "waits": "ru_nvcsw", "preemptions": "ru_nivcsw"}
    stages = {name: stats[name]["cpu_seconds"] for name in STAGES if "cpu_seconds" in stats.get(name, {})}
    return {
        "cpu": 1e6 * used / num_rows,
        "wall": 1e6 * wall / num_rows,
        "stages": {name: 1e6 * seconds / num_rows for name, seconds in stages.items()},
        **{name: 1e3 * (getattr(after, own) - getattr(before, own)) / num_rows for name, own in counts.items()},
    }


def profile(sides: dict[str, Run], num_rows: int, repeats: int) -> Found:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(repeats + 1):  # the first is a warm-up
        for name in sides if turn % 2 else reversed(sides):
            say(f"{name}, turn {turn} of {repeats}")
            figures = measure(sides[name], num_rows)
            if turn:
                found[name].append(figures)
    metrics = {}
    for name, runs in found.items():
        last = runs[-1]
        counted = ", ".join(f"{key} {last[key]:.2f}" for key in ("faults", "waits", "preemptions"))
        stages = ", ".join(f"{stage} {value:.3f}" for stage, value in last["stages"].items())
        note = f"per 1,000 rows: {counted}" + (f"; stages: {stages}" if stages else "")
        metrics[f"cpu_{name}"] = plain_value([run["cpu"] for run in runs], unit="us/row", note=note)
        metrics[f"wall_{name}"] = plain_value([run["wall"] for run in runs], unit="us/row")
    return Found(metrics=metrics, extra={"runs": found})


def main() -> None:
    options = parse_options(__doc__ or "", quick="16 row groups instead of 48, 3 turns instead of 9")
    warn_if_busy()
    torch.set_num_threads(1)
    groups = {"tiny": 3, "quick": 16, "full": 48}[options.size]
    epochs, repeats = {"tiny": (1, 1), "quick": (2, 3), "full": (4, 9)}[options.size]
    parts = Parts(options)
    with tempfile.TemporaryDirectory(prefix="recmill-ingest-") as scratch:
        data = write_dataset(Path(scratch, "data"), num_groups=groups, rows_per_group=ROWS_PER_GROUP, seed=options.seed)
        sides: dict[str, Run] = {
            "loop": partial(read_peer, plain_loop, data, 0, epochs),
            "ours": partial(read_ours, data, epochs),
            "ours_in_order": partial(read_ours, data, epochs, shuffle=False),
            "ours_crowded": partial(read_ours, data, epochs, workers=8),
        }
        if find_spec("grain"):
            sides["grain"] = partial(read_peer, grain, data, 2, epochs)
        else:
            parts.skipped |= dict.fromkeys(("cpu_grain", "wall_grain"), "grain is not installed")
        parts.measure("profile", lambda: profile(sides, groups * ROWS_PER_GROUP * epochs, repeats))
    parts.finish()


if __name__ == "__main__":
    main()
