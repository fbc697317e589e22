"""One rank of the FAE benchmark: `fae_rank.py JOB.json`, started by benchmarks/fae.py on every rank.

Both sides run in the same processes and are measured in turns: TorchRec's tables, table-wise, and hot batches.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fae_data import DIM
from fae_training import BENCH_CONFIG, make_variant, striped
from shaped_network import read_counters, write_result
from torchrec import KeyedJaggedTensor

from recmill.artifacts import Dataset, ShardPlan
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.planning.planner import Topology, default_plan
from recmill.training.processes import keep_freed_memory
from recmill.training.switches import LOOKAHEAD


def hot_batches(job: dict[str, Any], split: str) -> list[KeyedJaggedTensor]:
    """Batches of hot samples as slots; `hot_ids` holds the same samples as rows."""
    with IngestPipeline(
        job["laid_out"],
        split=split,
        batch_size=job["batch_size"],
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        shuffle=False,
    ) as batches:
        return [batch.ids for _, batch in zip(range(job["num_batches"]), batches, strict=False)]


def as_rows(slots: KeyedJaggedTensor, rows_of: dict[str, torch.Tensor], schema: Schema) -> KeyedJaggedTensor:
    values = [rows_of[schema.feature(key).table][own.values()] for key, own in slots.to_dict().items()]
    return KeyedJaggedTensor(keys=slots.keys(), values=torch.cat(values), lengths=slots.lengths())


def measure_embedding(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds per batch of lookup, backward and update; both sides get the same gradients, as from a model."""
    schema, plan = Schema.load(job["data"]), ShardPlan.load(job["plan"])
    config = replace(BENCH_CONFIG, batch_size=job["batch_size"])
    variant = make_variant(Dataset.load(job["data"]), Dataset.load(job["laid_out"]), plan, config)
    tables = variant.model.module.module.embeddings
    slots = hot_batches(job, "hot")
    rows = [as_rows(batch, dict(variant.model.hot[0].hot_rows), schema) for batch in slots]
    gradients = [{key: torch.randn(batch.stride(), DIM) for key in batch.keys()} for batch in slots]  # noqa: SIM118
    variant.model.enter_hot()
    hot = variant.model.hot[0]

    def run(lookup: Callable[[KeyedJaggedTensor], Any], batches: list[KeyedJaggedTensor]) -> float:
        dist.barrier()
        before, start, used = read_counters(), time.perf_counter(), time.process_time()
        for batch, gradient in zip(batches, gradients, strict=True):
            found = lookup(batch).to_dict()
            torch.autograd.backward([found[key] for key in gradient], list(gradient.values()))
        dist.barrier()
        seconds = (time.perf_counter() - start) / len(batches)
        cpu.append((time.process_time() - used) / len(batches))
        after = read_counters()
        if before and after:
            sent.append((after["sent"] - before["sent"]) / len(batches))
        return seconds

    sent: list[float] = []
    cpu: list[float] = []
    sides: dict[str, list[float]] = {"baseline": [], "reduced": [], "raw": []}
    moved: dict[str, float] = {}
    cpu_s: dict[str, list[float]] = {}
    for turn in range(job["warm_ups"] + job["turns"]):
        print(f"embedding, turn {turn}", flush=True)  # a sign of life
        for name in sides:
            hot.sync = name if name != "baseline" else hot.sync
            value = run(tables.pooled, rows) if name == "baseline" else run(hot, slots)
            if turn >= job["warm_ups"]:
                sides[name].append(value)
                cpu_s.setdefault(name, []).append(cpu[-1])
            if sent:
                moved[name] = sent[-1]
    return {**sides, "sent_bytes": moved, "cpu_s": cpu_s}


def measure_training(job: dict[str, Any]) -> dict[str, Any]:
    """Samples per second of whole epochs; with `is_ahead` also of striped rows with lookahead and without it."""
    data = Dataset.load(job["data"])
    plan = ShardPlan.load(job["plan"])
    laid_out = Dataset.load(job["laid_out"]) if job.get("laid_out") else None
    config = replace(BENCH_CONFIG, batch_size=job["batch_size"])
    plain = default_plan(Schema.load(data.path), Topology.local(dist.get_world_size()))
    baseline = make_variant(data, None, plain, config)
    ours = make_variant(data, laid_out, plan, config, sync=job.get("sync", "reduced"))
    variants = {"baseline": baseline, "ours": ours}
    if job.get("is_ahead"):
        variants["striped"] = make_variant(data, None, striped(plain), config)
        variants["ahead"] = make_variant(data, None, plain, replace(config, hot_batches=LOOKAHEAD))
    sides: dict[str, list[float]] = {name: [] for name in variants}
    cpu_s: dict[str, float] = {}
    sent: dict[str, float] = {}
    num_epochs = job["warm_ups"] + job["turns"]
    for turn in range(num_epochs):
        order = list(variants.items())
        for name, variant in order if turn % 2 == 0 else reversed(order):
            before, used = read_counters(), time.process_time()
            rate = variant.train_epoch()
            cpu_s[name] = time.process_time() - used
            if before and (after := read_counters()):
                sent[name] = after["sent"] - before["sent"]
            print(f"{name}, turn {turn}: {rate:.0f} samples/s", flush=True)  # a sign of life
            if turn >= job["warm_ups"]:
                sides[name].append(rate)
    return {**sides, "swap_s": ours.swap_s / num_epochs, "epoch_cpu_s": cpu_s, "epoch_sent_bytes": sent}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "embedding": measure_embedding,
    "training": measure_training,
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    keep_freed_memory()
    dist.init_process_group("gloo")
    results = {name: TASKS[job["task"]](job) for name, job in jobs.items()}
    write_result(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
