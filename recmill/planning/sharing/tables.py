"""Tables with shared parameters in a plan: the memory they leave for other tables, and their entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from recmill.artifacts import InputError, ShardPlan
from recmill.data.schema import Schema
from recmill.planning.sharing.choice import SharedChoice
from recmill.planning.tiers.entries import whole_table
from recmill.planning.tiers.problem import table_bytes

Request = TypeVar("Request", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The chosen shared tables, possibly none. Every rank holds the shared array and the exact rows."""

    choice: SharedChoice

    @property
    def tables(self) -> frozenset[str]:
        return frozenset(self.choice.shared.tables) if self.choice.shared else frozenset()

    def others(self, schema: Schema) -> Schema | None:
        """The schema of the tables that keep their own parameters; None if there are none."""
        kept = tuple(f for f in schema.features if f.kind == "dense" or f.table not in self.tables)
        return schema.select(f.name for f in kept) if any(f.kind != "dense" for f in kept) else None

    def bytes_per_rank(self, schema: Schema) -> int:
        kept = sum(table_bytes(t) for t in schema.tables if t.name not in self.tables)
        return self.choice.chosen_bytes - kept if self.tables else 0

    def left_for_others(self, request: Request) -> Request:
        """The request with the memory that shared tables leave on every rank."""
        if not self.tables:
            return request
        held = self.bytes_per_rank(Schema.load(request.profile.path))
        left = request.memory_budget_bytes - held
        if left < 1:
            raise InputError(
                f"shared tables take {held:,} B on every rank, the budget is {request.memory_budget_bytes:,} B: "
                f"{1 - left:,} B too little; compress more, or give more memory"
            )
        return replace(request, memory_budget_bytes=left)

    def added_to(self, plan: ShardPlan, schema: Schema) -> ShardPlan:
        """The plan with the shared tables, in a placement that TorchRec takes should a run switch sharing off."""
        if not self.tables:
            return plan
        held = self.bytes_per_rank(schema)
        shared = [table for table in schema.tables if table.name in self.tables]
        tables = {
            table.name: whole_table(
                table,
                schema,
                plan.topology,
                rank=position % plan.world_size,
                placement="shared",
                why=self.choice.reasons[table.name],
            )
            for position, table in enumerate(shared)
        }
        rank_bytes = tuple(rank + held for rank in plan.rank_bytes)
        return replace(plan, tables={**plan.tables, **tables}, rank_bytes=rank_bytes, shared=self.choice.shared)
