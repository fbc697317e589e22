"""One of two ranks of benchmarks/recd.py: counts the bytes of its all-to-alls in training steps.

Each table is whole on one rank, as without a plan. Bytes that stay on their rank are not counted.
"""

from __future__ import annotations

import logging
import warnings
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from flexshard_rank import Wire
from torch.nn import functional

from recmill.artifacts import Dataset
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.planning.planner import Topology, default_plan
from recmill.training.config import TrainConfig
from recmill.training.rank.dedup import choose_dedup_together
from recmill.training.rank.sharding import shard_model

NUM_RANKS = 2


def count_bytes(job: dict[str, Any], side: dict[str, str], wire: Wire) -> dict[str, int]:
    """Bytes that this rank sent and samples that it trained on, in the first batches of an epoch."""
    dataset, schema = Dataset.load(side["data"]), Schema.load(side["data"])
    own = {"batch_size": job["batch_size"], "seed": job["seed"], "dedup": side["dedup"]}
    config = TrainConfig(**own, sequence_encoder="mean", session_limit=0)
    dedup = choose_dedup_together(dataset, schema, config, None)
    plan = default_plan(schema, Topology.local(dist.get_world_size()))
    sharded = shard_model(schema, config, plan, torch.device("cpu"), dedup=dedup)
    distinct: dict[str, Any] = {"dedup": dedup.groups, "windows": dedup.windows} if dedup.groups else {}
    batches = IngestPipeline(
        dataset,
        batch_size=config.batch_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        seed=config.seed,
        **distinct,
    )
    wire.take()
    num_samples = 0
    with batches:
        for batch in islice(batches, job["num_batches"]):
            logits_B = sharded.module(batch.dense_BF, batch.ids)
            loss = functional.binary_cross_entropy_with_logits(logits_B, batch.label_B, reduction="sum")
            torch.autograd.backward(loss / batch.num_global)
            num_samples += len(batch)
    return {"sent": int(wire.take()["sent"]), "num_samples": num_samples}


def count_on_rank(job: dict[str, Any], store: str, rank: int) -> dict[str, dict[str, int]]:
    """`job`: {"batch_size", "num_batches", "seed", "sides": {name: {"data", "dedup"}}}; `store`: where ranks meet."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS)
    wire = Wire()
    dist.all_to_all_single = wire.all_to_all_single
    counted = {name: count_bytes(job, side, wire) for name, side in job["sides"].items()}
    dist.barrier()
    dist.destroy_process_group()
    return counted
