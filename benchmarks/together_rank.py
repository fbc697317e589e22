"""One rank of benchmarks/together.py: trains every job in turns, all in one process group.

    together_rank.py JOBS.json        {"repeats": 2, "jobs": [{"name", ...a job of recmill.training.trainer}]}

Every repeat starts from fresh weights in a fresh folder; jobs run in order, then in reverse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shaped_network import read_counters, write_result

from recmill.artifacts import Dataset
from recmill.training.ablation import figures_of
from recmill.training.worker import open_run


def main(jobs_path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = json.loads(Path(jobs_path).read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in wanted["jobs"]}
    for repeat in range(wanted["repeats"]):
        for job in wanted["jobs"] if repeat % 2 == 0 else wanted["jobs"][::-1]:
            found[job["name"]].append(train_once(job, repeat))
    write_result(found)
    dist.destroy_process_group()


def train_once(job: dict[str, Any], repeat: int) -> dict[str, Any]:
    out = Path(job["out"], f"turn-{repeat}")
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    run = open_run({**job, "out": str(out)}, torch.device("cpu"))
    before = read_counters()
    result = run.train()
    after = read_counters()
    traffic: dict[str, int] = {}
    for store in run.sharded.stores:
        if hasattr(store, "traffic"):
            for name, count in store.traffic().items():
                traffic[name] = traffic.get(name, 0) + count
    figures = figures_of(result, Dataset.load(job["data"])) if result else {}
    crossed = after["node_sent"] - before["node_sent"] if before and after else None
    return {**figures, "num_steps": run.state.step, "traffic": traffic, "inter_node_bytes": crossed}


if __name__ == "__main__":
    main(sys.argv[1])
