"""What holds each table in a run: TorchRec, tiers of rows, or shared parameters, by the plan and the switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow.parquet as pq
import torch
from torch import Tensor

from recmill.artifacts import InputError, ShardPlan, join_path
from recmill.data.schema import Schema
from recmill.training.config import TrainConfig
from recmill.training.switches import placed, shared_tables, wants_hot_batches


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Tables by what holds them; every other table is TorchRec's. Hot rows come on top, for hot batches."""

    tiered: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    hot_rows: Mapping[str, Tensor] = field(default_factory=dict)  # table -> ids by slot

    @property
    def elsewhere(self) -> frozenset[str]:
        return self.tiered | self.shared


def place_tables(schema: Schema, plan: ShardPlan, config: TrainConfig) -> Placement:
    """Where every table of this run lives. A switch set to "true" that the plan cannot serve is an error."""
    tiered = frozenset() if config.tiers == "false" else placed(plan, "tiered")
    shared = shared_tables(plan, config)
    for switch, tables, option in (("tiers", tiered, "--strategy tiers"), ("sharing", shared, "--compress")):
        if getattr(config, switch) == "true" and not tables:
            raise InputError(f"{switch}=true, but the plan has no table for it; make one with `recmill plan {option}`")
    hot_rows = hot_rows_of(plan) if wants_hot_batches(plan, config) else {}
    unheld = {table.name for table in schema.tables} - shared - set(hot_rows)
    if hot_rows and unheld:
        raise InputError(f"{plan.path}: the hot set says nothing of table(s) {', '.join(sorted(unheld))}")
    return Placement(
        tiered=tiered,
        shared=shared,
        hot_rows={name: rows for name, rows in hot_rows.items() if name not in shared},
    )


def hot_rows_of(plan: ShardPlan) -> dict[str, Tensor]:
    """The ids of every table's hot rows in the order of their slots."""
    return {name: _rows_by_slot(plan, f"hot/{name}.parquet") for name in plan.body["hot_set"]["tables"]}


def exact_rows_of(plan: ShardPlan) -> dict[str, Tensor]:
    """The ids of the rows that keep parameters of their own, in the order of their slots, of every shared table."""
    return {
        name: _rows_by_slot(plan, f"exact/{name}.parquet")
        for name, entry in plan.body["shared"]["tables"].items()
        if entry["kind"] == "both"
    }


def _rows_by_slot(plan: ShardPlan, file: str) -> Tensor:
    table = pq.read_table(join_path(plan.path, file)).sort_by("slot")
    return torch.from_numpy(table["row"].to_numpy().copy())
