"""What holds each table in a run, by the plan and the switches: TorchRec, tiers of rows, shared parameters or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from recmill.artifacts import InputError, ShardPlan
from recmill.data.hot.remap import load_hot_rows
from recmill.data.schema import Schema, Table
from recmill.planning.sharing.choice import read_exact_rows
from recmill.training.config import TrainConfig
from recmill.training.switches import looks_ahead, placed, shared_tables, wants_hot_batches

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TableHolders:
    """Tables by what holds them; TorchRec holds the others. Hot rows are copies for hot batches."""

    tiered: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    hot_rows: Mapping[str, Tensor] = field(default_factory=dict)  # table -> ids by slot
    on_disk: Mapping[str, Tensor] = field(default_factory=dict)  # table -> ids of the rows that stay in memory
    cached: Mapping[str, float] = field(default_factory=dict)  # table in host memory -> share of its rows on the GPU

    @property
    def elsewhere(self) -> frozenset[str]:
        return self.tiered | self.shared | frozenset(self.on_disk)


def assign_tables(schema: Schema, plan: ShardPlan, config: TrainConfig, *, device: str = "cpu") -> TableHolders:
    """What holds every table of this run. A switch set to "true" that the plan does not support is an error."""
    tiered = frozenset() if config.tiers == "false" else placed(plan, "tiered")
    shared = shared_tables(plan, config)
    for switch, tables, option in (("tiers", tiered, "--strategy tiers"), ("sharing", shared, "--compress")):
        if getattr(config, switch) == "true" and not tables:
            raise InputError(f"{switch}=true, but the plan has no table for it; make one with `recmill plan {option}`")
    if looks_ahead(config):
        if config.table_memory_bytes:
            raise InputError("hot_batches=lookahead keeps all rows in memory; leave out table_memory_bytes")
        return TableHolders(tiered=frozenset(table.name for table in schema.tables) - shared, shared=shared)
    hot_rows = load_hot_rows(plan) if wants_hot_batches(plan, config) else {}
    unheld = {table.name for table in schema.tables} - shared - set(hot_rows)
    if hot_rows and unheld:
        raise InputError(f"{plan.path}: the hot set lacks table(s) {', '.join(sorted(unheld))}")
    beyond = tables_beyond_memory(schema, config, others=tiered | shared)
    return TableHolders(
        tiered=tiered,
        shared=shared,
        hot_rows={name: torch.from_numpy(rows) for name, rows in hot_rows.items() if name not in shared},
        on_disk=_resident_rows(plan, beyond) if device == "cpu" else {},
        cached={} if device == "cpu" else _cached_shares(schema, config, beyond, plan.world_size),
    )


def tables_beyond_memory(schema: Schema, config: TrainConfig, *, others: frozenset[str] = frozenset()) -> list[str]:
    """The largest tables, as many as must leave memory for the rest to fit into `table_memory_bytes`.

    Tables in `others` are held in other ways and do not count.
    """
    if not config.table_memory_bytes:
        return []
    sizes = {table.name: _table_bytes(table, config) for table in schema.tables if table.name not in others}
    beyond: list[str] = []
    for name in sorted(sizes, key=lambda own: (-sizes[own], own)):
        if sum(sizes.values()) - sum(sizes[own] for own in beyond) <= config.table_memory_bytes:
            break
        beyond.append(name)
    return beyond


def _table_bytes(table: Table, config: TrainConfig) -> int:
    """Rows and optimiser state."""
    state_width = {"sgd": 0, "adagrad": table.dim, "rowwise_adagrad": 1}[config.table_optimiser]
    return table.num_rows * FLOAT_BYTES * (table.dim + state_width)


def _resident_rows(plan: ShardPlan, tables: list[str]) -> dict[str, Tensor]:
    """The plan's hot rows of tables on disk stay in memory; none where it has no hot set."""
    hot = load_hot_rows(plan) if tables and plan.hot_set else {}
    return {name: torch.from_numpy(hot.get(name, np.empty(0, np.int64))) for name in tables}


def _cached_shares(schema: Schema, config: TrainConfig, tables: list[str], num_ranks: int) -> dict[str, float]:
    """GPU memory left by the other tables, as a share of the rows of those that exceed it."""
    sizes = {table.name: _table_bytes(table, config) for table in schema.tables}
    beyond = sum(sizes[name] for name in tables)
    left = config.table_memory_bytes * num_ranks - (sum(sizes.values()) - beyond)
    return dict.fromkeys(tables, max(0, left) / max(1, beyond))


def exact_rows_of(plan: ShardPlan) -> dict[str, Tensor]:
    """Per shared table the ids of the rows that keep parameters of their own, in the order of their slots."""
    return {
        name: torch.from_numpy(read_exact_rows(plan.path, name))
        for name, entry in (plan.shared.tables if plan.shared else {}).items()
        if entry.kind == "both"
    }
