"""Looks up the features of a request: one matrix with the vectors of all of them, slot beside slot.

    slots            0        1        2
    vectors_NVD   [ dense  | item   | history ]      one row per list of each feature: per request or per candidate

All features whose tables have rows of their own are looked up by one call of kernels/pool_tables, which also checks
their lists. `is_fused=False` looks up feature after feature with torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pool_tables import PooledTables, TableFeature, pool_tables
from recmill.model.encoders import MeanEncoder
from recmill.serving.batch import Lists
from recmill.serving.tables import ServedTable, StoredRows, pool_lists

# N = lists of a feature, V = vectors, D = their width


@dataclass(frozen=True, kw_only=True, eq=False)
class FeaturePath:
    """How a feature with ids becomes a vector."""

    name: str
    table: ServedTable
    is_mean: bool
    is_user: bool  # the caller gives it once per request
    is_user_vector: bool  # and its vector is the same for all candidates: a history weighed for a target is not
    encoder: Any  # of a sequence, else None
    projection: Any  # to the width of all vectors, if the table has another
    target: str  # the feature that a sequence is weighed for, or ""

    @property
    def is_pooled(self) -> bool:
        """Whether its vector is a sum or mean of its rows; all other encoders need the rows."""
        return self.encoder is None or isinstance(self.encoder, MeanEncoder)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a lookup found. Slots of dense values and of encoded sequences are still to be filled."""

    vectors_NVD: Tensor
    pooled: Mapping[str, Tensor]  # before projections, where anything asks for them
    rows: Mapping[str, Tensor]  # of sequences that are not pooled: one row per id


class SlotLookup:
    """The lookup of some features. `slots` says where the vector of each goes; one without a slot has none here."""

    def __init__(
        self,
        features: Sequence[FeaturePath],
        slots: Mapping[str, int],
        *,
        num_slots: int,
        width: int,
        limit: int,
        targets: frozenset[str] = frozenset(),
        is_fused: bool = True,
    ) -> None:
        self.slots, self.num_slots, self.width = slots, num_slots, width
        self.targets = targets & {own.name for own in features}
        fused = [own for own in features if is_fused and isinstance(own.table, StoredRows)]
        self.names = [own.name for own in fused]
        self.apart = [own for own in features if own not in fused]
        self.projected = [own for own in features if own.projection is not None and own.is_pooled]
        self.raw_columns: dict[str, int] = {}
        self.row_names = [own.name for own in fused if not own.is_pooled]
        total = num_slots * width
        described = []
        for own in fused:
            table: Any = own.table
            column = -1
            if own.is_pooled:
                if own.projection is None:
                    column = slots[own.name] * width
                else:
                    column = self.raw_columns[own.name] = total
                    total += table.dim
            described.append(
                TableFeature(
                    rows=table.bytes_,
                    order=table.order,
                    form=table.table.form,
                    dim=table.dim,
                    column=column,
                    is_mean=own.is_mean or own.encoder is not None,
                    max_length=0 if own.encoder is None else limit,
                )
            )
        self.tables = PooledTables(described, width=total)

    def __call__(self, ids: Mapping[str, Lists], num_lists: int) -> Found:
        """`ids` may hold features that are not looked up here. ValueError if lists are not as the tables need them."""
        out_NW, unpooled = pool_tables(self.tables, [ids[name] for name in self.names], num_lists=num_lists)
        vectors_ND = out_NW if not self.raw_columns else out_NW[:, : self.num_slots * self.width]
        vectors_NVD = vectors_ND.view(num_lists, self.num_slots, self.width)
        rows = dict(zip(self.row_names, unpooled, strict=True))
        pooled: dict[str, Tensor] = {}
        for own in self.apart:
            values, offsets = ids[own.name]
            if own.encoder is None:
                pooled[own.name] = vector_ND = pool_lists(own.table, values, offsets, is_mean=own.is_mean)
                if own.projection is None:
                    vectors_NVD[:, self.slots[own.name]] = vector_ND
            else:
                rows[own.name] = own.table.rows(torch.from_numpy(values))
        for own in self.projected:
            if own.name in self.raw_columns:
                start = self.raw_columns[own.name]
                pooled[own.name] = out_NW[:, start : start + own.table.dim]
            if own.name in pooled:
                vectors_NVD[:, self.slots[own.name]] = functional.linear(pooled[own.name], own.projection.weight)
        for name in self.targets:
            if name not in pooled:
                pooled[name] = vectors_NVD[:, self.slots[name]]
        return Found(vectors_NVD=vectors_NVD, pooled=pooled, rows=rows)
