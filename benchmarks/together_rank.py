"""One rank of benchmarks/together.py: trains every job in turns, all in one process group.

    together_rank.py JOBS.json     {"repeats": 2, "jobs": [{"name", ...a job of recmill.training.trainer}]}

`reader_rows_per_s` of a job is what storage gives one reader.

Every repeat starts from fresh weights of another seed in a fresh folder; jobs run in order, then in reverse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shaped_network import write_result

from recmill.artifacts import Dataset, ShardPlan
from recmill.data.ingest import IngestPipeline
from recmill.training.ablation import figures_of, predicted_of
from recmill.training.processes import keep_freed_memory
from recmill.training.rank.worker import open_run


def main(jobs_path: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    wanted = json.loads(Path(jobs_path).read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in wanted["jobs"]}
    for repeat in range(wanted["repeats"]):
        for job in wanted["jobs"] if repeat % 2 == 0 else wanted["jobs"][::-1]:
            found[job["name"]].append(train_once(job, repeat))
            print(f"{job['name']}, turn {repeat}", flush=True)  # a sign of life
    write_result(found)
    dist.destroy_process_group()


def train_once(job: dict[str, Any], repeat: int) -> dict[str, Any]:
    out = Path(job["out"], f"turn-{repeat}")
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    config = {**job["config"], "seed": job["config"]["seed"] + repeat}
    run = open_run({**job, "config": config, "out": str(out)}, torch.device("cpu"))
    for pipeline in run.ingest.pipelines:
        pipeline.set_delays({"read": rows_per_group(pipeline) / job["reader_rows_per_s"]})
    result = run.train()
    if not result:
        return {}
    figures = figures_of(result, Dataset.load(job["data"]))
    on = [entry["switch"] for entry in result["decisions"] if entry["is_on"]]
    counted = {"num_steps": result["num_steps"], "switches_on": on}
    return {**figures, **predicted_of(ShardPlan.load(job["plan"]), result), **counted}


def rows_per_group(pipeline: IngestPipeline) -> float:
    """The mean over the row groups of a split."""
    parts = pipeline.dataset.split_parts(pipeline.split)
    return pipeline.num_rows / sum(len(part.row_group_rows) for part in parts)


if __name__ == "__main__":
    main(sys.argv[1])
