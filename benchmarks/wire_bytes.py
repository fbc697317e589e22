"""How many bytes the all-to-alls of a training step move for a batch."""

from __future__ import annotations

from typing import Any

from torchrec import KeyedJaggedTensor

from recmill.data.batch import Batch
from recmill.data.schema import Schema


def wire_bytes(batch: Batch, schema: Schema) -> int:
    """Bytes of the three all-to-alls of a step: ids and lengths out, vectors back, their gradients out again.

    Computed, not measured, for tables that all lie on other ranks: with N ranks, 1 - 1/N of it travels. Bags over
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
    """How many lists and ids of a feature a batch sends."""
    if isinstance(ids, KeyedJaggedTensor):
        return int(ids.stride()), ids[name].values().numel()
    group, window = ids.group_of(name), ids.windows(name)
    found = window[0] if window else ids.group_kjt(group)[name].values()
    return ids.num_distinct(group), found.numel()
