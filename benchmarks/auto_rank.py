"""One rank of benchmarks/auto_grid.py: trains the jobs of a cell in turns, all in one process group.

    torchrun ... auto_rank.py JOBS.json RESULT.json     {"repeats": 2, "jobs": [{"name", ...a job of the trainer}]}

Every repeat starts from fresh weights of another seed in a fresh folder; jobs run in order, then in reverse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.training.processes import keep_freed_memory
from recmill.training.rank.worker import open_run

KEPT = ("samples_per_s", "seconds", "trial_seconds", "evaluations", "decisions", "num_steps")


def main(jobs_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    wanted = json.loads(Path(jobs_path).read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in wanted["jobs"]}
    for repeat in range(wanted["repeats"]):
        for job in wanted["jobs"] if repeat % 2 == 0 else wanted["jobs"][::-1]:
            found[job["name"]].append(train_once(job, repeat))
    if dist.get_rank() == 0:
        Path(result_path).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def train_once(job: dict[str, Any], repeat: int) -> dict[str, Any]:
    out = Path(job["out"], f"repeat-{repeat}")
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    config = {**job["config"], "seed": job["config"]["seed"] + repeat}
    result = open_run({**job, "config": config, "out": str(out)}, torch.device("cpu")).train()
    return {**{name: result[name] for name in KEPT}, "auc": result["metrics"]["auc"]} if result else {}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
