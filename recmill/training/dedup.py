"""Which features a run trains once a distinct row: decided from the first batch it would read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kernels import distinct_rows
from recmill.artifacts import Dataset, InputError
from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.planning.dedup import MIN_FACTOR, pays
from recmill.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DedupChoice:
    """Groups of features that share an inverse, those of them that are stored as windows, and numbers that repeat."""

    groups: tuple[tuple[str, ...], ...] = ()
    windows: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()  # the dense features, if whole rows of them repeat

    @property
    def features(self) -> frozenset[str]:
        return frozenset((*self.dense, *(name for group in self.groups for name in group)))

    def to_json(self) -> dict[str, list[Any]]:
        """What the result of a run says of it; `dense` only where numbers repeat."""
        found: dict[str, list[Any]] = {"groups": [list(group) for group in self.groups], "windows": list(self.windows)}
        return {**found, "dense": list(self.dense)} if self.dense else found


def choose_dedup(dataset: Dataset, schema: Schema, config: TrainConfig) -> DedupChoice:
    """The features worth deduplicating in batches of this run; none where `dedup` is off.

    Groups come from the data: features that repeat together share an inverse. The whole global batch is looked at, so
    every rank and every world size decides alike.
    """
    if config.dedup == "false":
        return DedupChoice()
    with IngestPipeline(dataset, batch_size=config.batch_size, seed=config.seed, shuffle=config.shuffle) as batches:
        batch = next(iter(batches))
    found = InverseKeyedJaggedTensor.from_kjt(batch.ids, min_factor=1.0 + 1e-9)
    groups = [
        tuple(keys)
        for position, keys in enumerate(found.groups)
        if not found.is_plain(position) and (config.dedup == "true" or _pays(found, position, schema))
    ]
    shifting = [feature.name for feature in schema.sequence if feature.shift]
    windows = tuple(name for name in shifting if any(name in group for group in groups))
    dense = tuple(feature.name for feature in schema.dense)
    if not dense or not _repeats(batch.dense_BF, at_least=1.0 + 1e-9 if config.dedup == "true" else MIN_FACTOR):
        dense = ()
    return DedupChoice(groups=tuple(groups), windows=windows, dense=dense)


def _repeats(rows_BF: Tensor, *, at_least: float) -> bool:
    return len(rows_BF) >= at_least * len(distinct_rows(rows_BF)[0])


def choose_dedup_together(dataset: Dataset, schema: Schema, config: TrainConfig) -> DedupChoice:
    """What `choose_dedup` says on rank 0, on every rank of the default process group: one of them reads the batch."""
    shared: list[DedupChoice | InputError | None] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [choose_dedup(dataset, schema, config)]
        except InputError as error:  # every rank must hear of it, or the others would wait for ever
            shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], InputError):
        raise shared[0]
    assert shared[0] is not None, "rank 0 sends its choice or its error"
    return shared[0]


def _pays(found: InverseKeyedJaggedTensor, position: int, schema: Schema) -> bool:
    num_distinct = max(found.num_distinct(position), 1)
    mean_length = found.group_kjt(position).values().numel() / (num_distinct * len(found.groups[position]))
    is_sequence = any(schema.feature(name).kind == "sequence" for name in found.groups[position])
    return pays(found.stride() / num_distinct, mean_length, is_sequence=is_sequence)
