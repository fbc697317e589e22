"""Tables with shared parameters in a plan: what they leave for the others, and how plan.json lists them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.planning.sharing.choice import SharedChoice
from recmill.planning.tiers.costs import STATE_BYTES_PER_ROW, WEIGHT_BYTES
from recmill.planning.tiers.entries import shard_entry

Request = TypeVar("Request", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A choice of shared tables, none included. Every rank holds the shared array and the exact rows."""

    choice: SharedChoice

    @property
    def tables(self) -> frozenset[str]:
        return frozenset(self.choice.shared["tables"]) if self.choice.shared else frozenset()

    def others(self, schema: Schema) -> Schema | None:
        """The schema of the tables that keep their own parameters; None if there are none."""
        kept = tuple(f for f in schema.features if f.kind == "dense" or f.table not in self.tables)
        return replace(schema, features=kept) if any(f.kind != "dense" for f in kept) else None

    def bytes_per_rank(self, schema: Schema) -> int:
        kept = sum(_table_bytes(t.num_rows, t.dim) for t in schema.tables if t.name not in self.tables)
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
                f"{1 - left:,} B too little; ask for more with compress, or give more memory"
            )
        return replace(request, memory_budget_bytes=left)

    def add_to(self, body: dict[str, Any], schema: Schema, request: Any) -> None:
        """List the shared tables in plan.json, with a placement TorchRec takes should a run switch sharing off."""
        if not self.tables:
            return
        held = self.bytes_per_rank(schema)
        body["rank_bytes"] = [rank + held for rank in body["rank_bytes"]]
        world = request.topology.world_size
        for position, table in enumerate(table for table in schema.tables if table.name in self.tables):
            nothing = {"predicted_bytes_per_step": 0.0, "predicted_seconds_per_step": 0.0}
            held_whole = _table_bytes(table.num_rows, table.dim)
            body["tables"][table.name] = {
                "collection": "sequence" if table.name in schema.sequence_tables else "pooled",
                "placement": "shared",
                "sharding": "table_wise",
                "shards": [shard_entry(position % world, 0, table.num_rows, table.dim, request.topology)],
                "tiers": [{"kind": "table_wise", "num_rows": table.num_rows, "bytes": held_whole, **nothing}],
                "why": self.choice.reasons[table.name],
            }


def _table_bytes(num_rows: int, dim: int) -> int:
    return num_rows * (dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW)
