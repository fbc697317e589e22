"""One rank that trains every combination of switches in turn: `torchrun ... switches_rank.py WORK`.

WORK holds the dataset, the plans and job.json with the combinations; rank 0 writes results.json: the losses of every
step, the logical rows of every table and the AUC. One process group serves all, so that imports are paid for once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.data.schema import Schema
from recmill.training.rank.sharding import ShardedModel
from recmill.training.rank.worker import open_run


def main(work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads((work / "job.json").read_text())
    results = {entry["name"]: train(work, entry) for entry in job["combinations"]}
    if dist.get_rank() == 0:
        torch.save(results, work / f"results-{dist.get_world_size()}.pt")
    dist.destroy_process_group()


def train(work: Path, entry: dict[str, Any]) -> dict[str, Any]:
    out = work / f"out-{dist.get_world_size()}" / entry["name"]
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    run = open_run({**entry, "out": str(out)}, torch.device("cpu"))
    result = run.train()
    return {
        "losses": [point["loss"] for point in run.curve.entries],
        "tables": rows_of_tables(run.sharded, run.schema),
        "auc": result.get("metrics", {}).get("auc"),
        "hot": result.get("hot"),
        "dedup": bool(run.dedup.groups),
        "stores": [type(store).__name__ for store in run.sharded.stores],
        "wire_bytes": result.get("usage", {}).get("wire_bytes"),
        "tuning": result.get("tuning"),
    }


def rows_of_tables(sharded: ShardedModel, schema: Schema) -> dict[str, torch.Tensor]:
    sharded.leave_hot()
    found = {}
    for table in schema.tables:
        for store in sharded.stores:
            held = store.array.tables if hasattr(store, "array") else store.tables
            if table.name in held:
                found[table.name] = store.gather_rows(table.name, torch.arange(table.num_rows))[0].clone()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
