"""Trains in this process, as one rank does, so that two variants can be timed in turns.

A measurement is one epoch, or its first batches, from the files on disk to the last optimiser step: every row is read,
converted and trained on once, and nothing is read ahead. Both variants run the same code; they differ in the layout
and in the features that the model deduplicates.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torchrec import KeyedJaggedTensor

from recmill.artifacts import Dataset
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.planning.planner import Topology, default_plan
from recmill.training.config import TrainConfig
from recmill.training.processes import keep_freed_memory
from recmill.training.rank.dedup import DedupChoice, choose_dedup
from recmill.training.rank.sharding import shard_model

MAX_LOSS_DIFFERENCE = 1e-4  # relative, after some steps: sums over samples are added in another order
CPU = torch.device("cpu")


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process only, with all cores unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(os.cpu_count() or 1)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def open_batches(dataset: Dataset, dedup: DedupChoice, *, batch_size: int, seed: int) -> IngestPipeline:
    """One pass over the training rows of a dataset with the default workers, deduplicated as `dedup` says."""
    distinct: dict[str, Any] = {"dedup": dedup.groups, "windows": dedup.windows} if dedup.groups else {}
    return IngestPipeline(dataset, batch_size=batch_size, seed=seed, **distinct)


class Trainer:
    """One variant: a model with the same initial weights as any other of this config, and its optimisers."""

    def __init__(
        self, dataset: Dataset, config: TrainConfig, *, num_batches: int | None = None, only_lists: bool = False
    ) -> None:
        """`num_batches` ends an epoch early, for models too slow for a whole log.

        `only_lists` deduplicates lists, but neither single ids nor dense rows.
        """
        config = replace(config, session_limit=0)  # what is measured is a part of a long run
        self.dataset, self.config, self.num_batches = dataset, config, num_batches
        schema = Schema.load(dataset.path)
        chosen = choose_dedup(dataset, schema, config)
        self.dedup = replace(chosen, dense=(), ids=()) if only_lists else chosen
        plan = default_plan(schema, Topology.local(1))
        self.sharded = shard_model(schema, config, plan, CPU, dedup=self.dedup)
        self.sharded.module.train()
        self._epoch = 0

    def open(self, dataset: Dataset | None = None) -> IngestPipeline:
        """The batches of the next epoch, from the trainer's dataset or from the same rows in another layout."""
        self._epoch += 1
        return open_batches(
            dataset or self.dataset, self.dedup, batch_size=self.config.batch_size, seed=self.config.seed + self._epoch
        )

    def step(self, batch: Batch) -> Tensor:
        """One optimiser step, as in the training loop; returns the mean loss before it."""
        batch = batch.to(CPU)
        logits_B = self.sharded.module(batch.dense_BF, batch.ids)
        loss_sum = functional.binary_cross_entropy_with_logits(logits_B, batch.label_B, reduction="sum")
        torch.autograd.backward(loss_sum / batch.num_global)
        self.sharded.dense_optimiser.step()
        self.sharded.dense_optimiser.zero_grad()
        return loss_sum.detach() / batch.num_global

    def train_epoch(self, dataset: Dataset | None = None) -> float:
        """Samples per second of one epoch, reading included."""
        started, num_samples = time.perf_counter(), 0
        with self.open(dataset) as batches:
            for batch in islice(batches, self.num_batches):
                self.step(batch)
                num_samples += len(batch)
        return num_samples / (time.perf_counter() - started)

    def peak_bytes(self) -> float:
        """Growth of this process's resident memory while an epoch is read and trained."""
        start = _settle_memory()
        self.train_epoch()
        return max(1, _memory_bytes("VmHWM") - start)


def check_same_losses(plain: Trainer, ours: Trainer, *, num_steps: int) -> float:
    """Take steps with both on the same rows; the largest relative difference of their losses, which must be tiny."""
    worst = 0.0
    with ours.open() as batches:
        for _, batch in zip(range(num_steps), batches, strict=False):
            is_plain = isinstance(batch.ids, KeyedJaggedTensor)
            expected = float(plain.step(batch if is_plain else replace(batch, ids=batch.ids.to_kjt())))
            worst = max(worst, abs(float(ours.step(batch)) - expected) / expected)
    if not worst <= MAX_LOSS_DIFFERENCE:
        raise SystemExit(f"the losses of both variants differ by {worst:.2e}, expected at most {MAX_LOSS_DIFFERENCE}")
    return worst


def _settle_memory() -> int:
    """Release what allocators keep and reset the peak; returns the remaining resident bytes."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5: reset the peak of the resident set
    return _memory_bytes("VmRSS")


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}: peak memory is measured on Linux only")
