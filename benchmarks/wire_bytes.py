"""Bytes of the all-to-alls of a training step: counted on two ranks, or computed from a batch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from harness import Metric, compare_counts
from recd_rank import NUM_RANKS, count_on_rank
from session_logs import Layouts
from torchrec import KeyedJaggedTensor

from recmill.data.ikjt.batch import Batch
from recmill.data.schema import Schema

SIDES = {"baseline": ("time", "false"), "ours": ("deduplicated", "auto")}  # the layout that is read, and `dedup`


def count_wire_bytes(
    logs: Mapping[str, Layouts], *, ranks: ProcessPoolExecutor, batch_size: int, num_batches: int, seed: int
) -> dict[str, Metric]:
    """Bytes per sample that two ranks pass to their all-to-alls: ids out, vectors back, gradients out again.

    `ranks` has one process per rank.
    """
    sides = {
        f"{name}/{side}": {"data": str(getattr(layouts, layout).path), "dedup": dedup}
        for name, layouts in logs.items()
        for side, (layout, dedup) in SIDES.items()
    }
    job = {"batch_size": batch_size, "num_batches": num_batches, "seed": seed, "sides": sides}
    with tempfile.TemporaryDirectory() as scratch:
        started = [ranks.submit(count_on_rank, job, f"{scratch}/store", rank) for rank in range(NUM_RANKS)]
        found = [rank.result() for rank in started]
    note = "counted: what 2 ranks hand to all-to-alls for each other; pooled DLRM, each table whole on one rank"
    metrics = {}
    for name in logs:
        counted = [[rank[f"{name}/{side}"] for rank in found] for side in SIDES]
        values = [sum(rank["sent"] for rank in own) / sum(rank["num_samples"] for rank in own) for own in counted]
        metrics[name] = compare_counts(*values, unit="bytes/sample", note=note)
    return metrics


def wire_bytes(batch: Batch, schema: Schema) -> int:
    """Bytes of the three all-to-alls of a step: ids and lengths out, vectors back, their gradients out again.

    Computed, not measured, for tables that are all on other ranks: with N ranks, 1 - 1/N of it is sent. Bags over
    distinct rows share one lookup, so each sends as many vectors as the one with the most rows.
    """
    total, ids = 0, batch.ids
    shape = {feature.name: _count_lists(ids, feature.name) for feature in schema.id_features}
    pooled = {feature.name for feature in schema.id_features if feature.table not in schema.sequence_tables}
    distinct = {name for name in pooled if shape[name][0] < len(batch)}
    most = max((shape[name][0] for name in distinct), default=0)
    for feature in schema.id_features:
        num_lists, num_ids = shape[feature.name]
        if feature.name in distinct:
            num_lists = most
        num_vectors = num_lists if feature.name in pooled else num_ids
        total += 8 * num_ids + 4 * num_lists + 2 * 4 * feature.dim * num_vectors
    return total


def _count_lists(ids: Any, name: str) -> tuple[int, int]:
    """Number of lists and ids of a feature that a batch sends."""
    if isinstance(ids, KeyedJaggedTensor):
        return int(ids.stride()), ids[name].values().numel()
    group, window = ids.group_of(name), ids.windows(name)
    found = window[0] if window else ids.group_kjt(group)[name].values()
    return ids.num_distinct(group), found.numel()
