"""One rank of benchmarks/auto_grid.py: trains the jobs of a cell in turns, all in one process group.

    torchrun ... auto_rank.py JOBS.json RESULT.json
        {"seconds": 60, "min_pairs": 4, "max_pairs": 24, "jobs": [{"name", ...a job of the trainer}]}

Every pair starts from fresh weights of another seed in a fresh folder; jobs run in order, then in reverse.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.model.stores.collectives import broadcast_json
from recmill.training.processes import frozen_objects, keep_freed_memory, own_cores
from recmill.training.rank.worker import open_run

KEPT = ("samples_per_s", "seconds", "evaluations", "decisions", "num_steps")
WARM_UP_STEPS = 6


def main(jobs_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    wanted = json.loads(Path(jobs_path).read_text(encoding="utf-8"))
    jobs: list[dict[str, Any]] = wanted["jobs"]
    found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in jobs}
    trial_s = sum(warm_up(job) for job in jobs)
    began, pair = time.perf_counter(), 0
    while not is_over(pair, time.perf_counter() - began, wanted):
        for job in jobs if pair % 2 == 0 else jobs[::-1]:
            found[job["name"]].append(train_once(job, pair))
        pair += 1
    if dist.get_rank() == 0:
        Path(result_path).write_text(json.dumps({**found, "trial_seconds": trial_s}), encoding="utf-8")
    dist.destroy_process_group()


def is_over(num_pairs: int, seconds: float, wanted: dict[str, Any]) -> bool:
    """Whether another pair would exceed the time of the cell; rank 0's clock decides."""
    is_full = num_pairs == wanted["max_pairs"] or seconds * (num_pairs + 1) > wanted["seconds"] * max(num_pairs, 1)
    return bool(broadcast_json(num_pairs >= wanted["min_pairs"] and is_full))


def warm_up(job: dict[str, Any]) -> float:
    """Train the first steps, which allocate; returns the seconds of the trial, whose verdicts the pairs remember."""
    run = open_run(job, torch.device("cpu"))
    run.sharded.module.train()
    with run.ingest:
        for batch, is_hot in islice(run.ingest, WARM_UP_STEPS):
            run.train_step(batch, is_hot)
    return run.verdicts.seconds


def train_once(job: dict[str, Any], pair: int) -> dict[str, Any]:
    out = Path(job["out"], f"pair-{pair}")
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    config = {**job["config"], "seed": job["config"]["seed"] + pair}
    run = open_run({**job, "config": config, "out": str(out)}, torch.device("cpu"))
    with frozen_objects():
        result = run.train()
    run.sharded.close()
    del run
    gc.collect()
    if dist.get_rank() == 0:
        shutil.rmtree(out)  # tens of checkpoints would fill the disk
    return {**{name: result[name] for name in KEPT}, "auc": result["metrics"]["auc"]} if result else {}


if __name__ == "__main__":
    with own_cores(threads=1):
        main(sys.argv[1], sys.argv[2])
