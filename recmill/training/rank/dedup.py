"""Which features a run trains once per distinct list: those of its plan, or what pays in the first batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels import distinct_keys, distinct_rows
from recmill.artifacts import Dataset, InputError, ShardPlan, read_record, record_json
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor
from recmill.data.ingest import IngestPipeline
from recmill.data.repeats import MIN_FACTOR, pays
from recmill.data.schema import Schema
from recmill.model.embeddings import Ids, looked_up_ids
from recmill.model.stores.collectives import broadcast_json
from recmill.training.config import TrainConfig
from recmill.training.rank.feed import session_limit

# How many repeated ids of a feature a batch must hold for finding them to pay. Two histories of 64 (131,000 ids each,
# 25,000 of them distinct) train a step in 105 instead of 122 ms on a CPU, two of 10,500 and 3,800 in 28 instead of 26.
MIN_SAVED_IDS = 16_384
ANY_REPEAT = 1.0 + 1e-9  # a factor above 1


@dataclass(frozen=True, kw_only=True)
class DedupChoice:
    """Groups of features that share an inverse, those of them that are stored as windows, and what else repeats."""

    groups: tuple[tuple[str, ...], ...] = ()
    windows: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()  # the dense features, if whole rows of them repeat
    ids: tuple[str, ...] = ()  # features of tables that sequences read, whose single ids repeat

    @property
    def features(self) -> frozenset[str]:
        return frozenset((*self.dense, *(name for group in self.groups for name in group)))

    def to_json(self) -> dict[str, list[Any]]:
        """The entry of result.json; `dense` and `ids` only where there are some."""
        found: dict[str, list[Any]] = {"groups": [list(group) for group in self.groups], "windows": list(self.windows)}
        return found | {key: list(own) for key, own in (("dense", self.dense), ("ids", self.ids)) if own}


def choose_dedup(dataset: Dataset, schema: Schema, config: TrainConfig, plan: ShardPlan | None = None) -> DedupChoice:
    """The features to deduplicate in batches of this run: the plan's; without a plan, those that pay.

    The first batch decides the rest: features that repeat together share an inverse, dense rows and single ids are
    deduplicated if enough of them repeat. It is the whole global batch, so every rank and world size decides alike.
    """
    if config.dedup == "false":
        return DedupChoice()
    with IngestPipeline(
        dataset,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        session_limit=session_limit(dataset, config),
    ) as batches:
        batch = next(iter(batches))
    takes_all = config.dedup == "true"
    planned = None if takes_all else planned_features(plan, dataset)
    choice = choose_lists(batch.ids, schema, takes_all=takes_all, planned=planned)
    found = batch.ids
    if choice.groups:
        found = InverseKeyedJaggedTensor.from_kjt(
            batch.ids, groups=choice.groups, windows=choice.windows, min_factor=ANY_REPEAT
        )
    return replace(
        choice,
        dense=_repeating_numbers(batch.dense_BF, schema, at_least=ANY_REPEAT if takes_all else MIN_FACTOR),
        ids=_repeating_ids(found, schema, at_least=1 if takes_all else MIN_SAVED_IDS),
    )


def choose_lists(
    ids: KeyedJaggedTensor, schema: Schema, *, takes_all: bool = False, planned: frozenset[str] | None = None
) -> DedupChoice:
    """Groups and windows of the features whose lists repeat often enough in a batch, or that are planned."""
    found = InverseKeyedJaggedTensor.from_kjt(ids, min_factor=ANY_REPEAT)
    groups: list[tuple[str, ...]] = []
    for position, keys in enumerate(found.groups):
        if planned is not None:
            own = tuple(key for key in keys if key in planned)
            groups += [(key,) for key in own] if found.is_plain(position) else [own] * bool(own)
        elif not found.is_plain(position) and (takes_all or _pays(found, position, schema)):
            groups.append(tuple(keys))
    shifting = [feature.name for feature in schema.sequence if feature.shift]
    windows = tuple(name for name in shifting if any(name in group for group in groups))
    return DedupChoice(groups=tuple(groups), windows=windows)


def planned_features(plan: ShardPlan | None, dataset: Dataset) -> frozenset[str] | None:
    """The features that the plan deduplicates; None where it does not say, or cannot know.

    It was made from lists in stored order. That holds for sessions, which stay together in a batch, but not for rows in
    time order, whose row groups are shuffled.
    """
    features = plan.dedup.features if plan and plan.dedup else {}
    if not features or dataset.layout == "time":
        return None
    return frozenset(name for name, found in features.items() if found.is_deduplicated)


def _repeating_numbers(rows_BF: Tensor, schema: Schema, *, at_least: float) -> tuple[str, ...]:
    """The dense features, if there are at least that many rows per distinct row."""
    names = tuple(feature.name for feature in schema.dense)
    return names if names and len(rows_BF) >= at_least * len(distinct_rows(rows_BF)[0]) else ()


def _repeating_ids(ids: Ids, schema: Schema, *, at_least: int) -> tuple[str, ...]:
    """Features of tables that sequences read, with at least that many repeated ids in the batch."""
    names = [feature.name for feature in schema.id_features if feature.table in schema.sequence_tables]
    sent = {name: looked_up_ids(ids, schema, name) for name in names}
    return tuple(name for name, own in sent.items() if len(own) - _count_distinct(own) >= at_least)


def _count_distinct(ids_N: Tensor) -> int:
    return len(distinct_keys(ids_N, bound=int(ids_N.max()) + 1)[0]) if len(ids_N) else 0


def choose_dedup_together(dataset: Dataset, schema: Schema, config: TrainConfig, plan: ShardPlan | None) -> DedupChoice:
    """The choice of rank 0, which alone reads the batch, on every rank of the default process group."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            found = {"choice": record_json(choose_dedup(dataset, schema, config, plan))}
        except InputError as error:  # every rank must receive it, or the others would wait for ever
            found = {"error": str(error)}
    found = broadcast_json(found)
    if "error" in found:
        raise InputError(found["error"])
    return read_record(DedupChoice, found["choice"], where="rank 0's choice")


def _pays(found: InverseKeyedJaggedTensor, position: int, schema: Schema) -> bool:
    num_distinct = max(found.num_distinct(position), 1)
    mean_length = found.group_kjt(position).values().numel() / (num_distinct * len(found.groups[position]))
    is_sequence = any(schema.feature(name).kind == "sequence" for name in found.groups[position])
    return pays(found.stride() / num_distinct, mean_length, is_sequence=is_sequence)
