"""What holds each table in a run: TorchRec, tiers of rows, or shared parameters, by the plan and the switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recmill.artifacts import InputError, ShardPlan
from recmill.data.hot_remap import load_hot_rows
from recmill.data.schema import Schema
from recmill.planning.sharing import read_exact_rows
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
    hot_rows = load_hot_rows(plan) if wants_hot_batches(plan, config) else {}
    unheld = {table.name for table in schema.tables} - shared - set(hot_rows)
    if hot_rows and unheld:
        raise InputError(f"{plan.path}: the hot set says nothing of table(s) {', '.join(sorted(unheld))}")
    return Placement(
        tiered=tiered,
        shared=shared,
        hot_rows={name: torch.from_numpy(rows) for name, rows in hot_rows.items() if name not in shared},
    )


def exact_rows_of(plan: ShardPlan) -> dict[str, Tensor]:
    """The ids of the rows that keep parameters of their own, in the order of their slots, of every shared table."""
    return {
        name: torch.from_numpy(read_exact_rows(plan.path, name))
        for name, entry in plan.body["shared"]["tables"].items()
        if entry["kind"] == "both"
    }
