"""Epochs of training with and without hot batches, on the ranks of the current process group."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score
from torch.nn import functional
from training_rate import one_rank

from recmill.artifacts import Dataset, ShardPlan
from recmill.artifacts.plan import TablePlan, Tier
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.planning.planner import Topology, default_plan
from recmill.training.config import TrainConfig
from recmill.training.rank.feed import Feed
from recmill.training.rank.hot_schedule import MIN_RATE
from recmill.training.rank.sharding import ShardedModel, shard_model
from recmill.training.switches import LOOKAHEAD

CPU = torch.device("cpu")
BENCH_CONFIG = TrainConfig(bottom_layers=(64,), top_layers=(64, 32), batch_size=8192)


@dataclass(kw_only=True)
class Variant:
    """A model and how it reads its data; `laid_out` is the dataset of hot batches, if it trains them."""

    model: ShardedModel
    config: TrainConfig
    data: Dataset
    laid_out: Dataset | None
    swap_s: float = 0.0
    num_epochs: int = 0
    turn_rate: float | None = None  # of hot and cold turns, instead of what the schedule starts with

    def _open(self, data: Dataset, split: str, *, shuffle: bool = True) -> IngestPipeline:
        return IngestPipeline(
            data,
            split=split,
            batch_size=self.config.batch_size,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            seed=self.config.seed + self.num_epochs,
            shuffle=shuffle,
        )

    def open_feed(self) -> Feed:
        self.num_epochs += 1
        if self.laid_out is None:
            announce = self.model.prefetch
            prefetch = None if announce is None else lambda batch: announce(batch.ids)
            return Feed(self._open(self.data, "train"), prefetch=prefetch, ahead=self.config.lookahead_batches)
        # With a generous budget every sample may be hot, and with a small one none.
        cold, hot = (
            self._open(self.laid_out, split) if split in self.laid_out.splits else None for split in ("cold", "hot")
        )
        feed = Feed(cold, hot)
        if self.turn_rate is not None and feed.schedule is not None:
            feed.schedule.rate = self.turn_rate
        return feed

    def step(self, batch: Batch, is_hot: bool) -> torch.Tensor:
        start = time.perf_counter()
        if is_hot != self.model.is_hot:
            self.model.enter_hot() if is_hot else self.model.leave_hot()
            self.swap_s += time.perf_counter() - start
        world_size = dist.get_world_size()
        logits_B = self.model.module(batch.dense_BF, batch.ids, is_hot)
        loss_sum = functional.binary_cross_entropy_with_logits(logits_B, batch.label_B, reduction="sum")
        torch.autograd.backward(loss_sum * (world_size / batch.num_global))
        self.model.dense_optimiser.step()
        self.model.dense_optimiser.zero_grad()
        return loss_sum.detach()

    def train_epoch(self, *, held_out: Dataset | None = None) -> float:
        """Samples per second over all ranks, from the files to the last optimiser step, swaps and syncs included.

        With `held_out` the scheduler gets the held-out loss after every turn; the evaluation is not timed.
        """
        self.model.module.train()
        dist.barrier()
        start, num_samples, paused = time.perf_counter(), 0, 0.0
        with self.open_feed() as feed:
            for number, (batch, is_hot) in enumerate(feed):
                self.model.schedule_lr(self.config, step=number, num_steps=len(feed))
                self.step(batch, is_hot)
                num_samples += batch.num_global
                if feed.wants_loss:
                    if held_out is None:
                        feed.wants_loss = False
                    else:
                        pause = time.perf_counter()
                        self.model.write_hot_back()
                        feed.observe(self.evaluate(held_out)[1])
                        paused += time.perf_counter() - pause
        if self.model.is_hot:
            self.model.leave_hot()
        dist.barrier()
        return num_samples / (time.perf_counter() - start - paused)

    @torch.no_grad()
    def evaluate(self, data: Dataset) -> tuple[float, float]:
        """(AUC, log loss) on the test split, of this rank's samples."""
        self.model.module.eval()
        logits, labels = [], []
        with self._open(data, "test", shuffle=False) as batches:
            for batch in batches:
                logits.append(self.model.module(batch.dense_BF, batch.ids, False))
                labels.append(batch.label_B)
        self.model.module.train()
        scores, truth = torch.cat(logits), torch.cat(labels)
        loss = float(functional.binary_cross_entropy_with_logits(scores, truth))
        return float(roc_auc_score(truth.numpy().astype(np.int64), scores.numpy())), loss


def auc_after_epoch(
    data: str,
    plan: str,
    laid_out: str | None,
    settings: dict[str, Any],
    *,
    order: int = 0,
    is_finest: bool = False,
) -> float:
    """AUC after an epoch in one process, in scheduled hot and cold turns or in random order.

    `settings` are those of TrainConfig; `order` is added to the seed of the order, not to that of the model. With
    `is_finest` the turns are as short as they can be, from the first to the last.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dataset = Dataset.load(data)
    alone = default_plan(Schema.load(data), Topology.local(1))
    chosen = replace(alone, path=plan, hot_set=ShardPlan.load(plan).hot_set)
    # With constant rates the order of the last batches decides: two random orders differ by 0.004 and more on globo.
    config = replace(BENCH_CONFIG, lr_schedule="linear", **settings)
    with one_rank():
        laid = Dataset.load(laid_out) if laid_out else None
        variant = make_variant(dataset, laid, chosen, config)
        variant.num_epochs = order
        variant.turn_rate = MIN_RATE if is_finest else None
        variant.train_epoch(held_out=dataset if laid and not is_finest else None)
        return variant.evaluate(dataset)[0]


def striped(plan: ShardPlan) -> ShardPlan:
    """The plan with the rows of all tables striped over the ranks: row-wise sharding with id dedup."""
    tier = {"kind": "global", "bytes": 0, "predicted_bytes_per_step": 0.0, "predicted_seconds_per_step": 0.0}
    tables = {
        name: replace(own, placement="tiered", tiers=(Tier(num_rows=_num_rows(own), **tier),))
        for name, own in plan.tables.items()
    }
    return replace(plan, tables=tables)


def _num_rows(table: TablePlan) -> int:
    return sum(shard.size[0] for shard in table.shards if shard.offset[1] == 0)


def make_variant(
    data: Dataset, laid_out: Dataset | None, plan: ShardPlan, config: TrainConfig, *, sync: str = "reduced"
) -> Variant:
    """`laid_out` None: the plan's tables alone, or with lookahead if the config says so."""
    if config.hot_batches != LOOKAHEAD:
        config = replace(config, hot_batches="false" if laid_out is None else "true")
    model = shard_model(Schema.load(data.path), config, plan, CPU)
    for collection in model.hot:
        collection.sync = sync
    return Variant(model=model, config=config, data=data, laid_out=laid_out)
