"""Where a rank keeps rows of one width: all tiers of all tables in one FBGEMM table, one part after another.

    key on a rank:   0 ... global | node | replicated | table_wise ... stride
    key anywhere:    rank * stride + key on that rank

The parts before `table_wise` have the same length on every rank, so a rank knows where another one keeps a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recmill.model.stores.tiered.exchange import Grid
from recmill.model.stores.tiered.tier_map import GLOBAL, NODE, REPLICATED, TABLE_WISE, TierMap

# N = ids


@dataclass(frozen=True, kw_only=True)
class KeyLayout:
    """The key of every row of some tables on the ranks that hold it."""

    grid: Grid
    maps: Mapping[str, TierMap]
    bases: Mapping[tuple[str, int], int]  # (table, kind) -> its first key on a rank
    node_start: int
    replicated_start: int
    whole_start: int
    stride: int  # keys of the rank with the most
    num_local: int  # keys of this rank

    @classmethod
    def of(cls, maps: Mapping[str, TierMap], grid: Grid) -> KeyLayout:
        shares = {GLOBAL: grid.world_size, NODE: grid.ranks_per_node, REPLICATED: 1}
        bases: dict[tuple[str, int], int] = {}
        starts, end = [], 0
        for kind in (GLOBAL, NODE, REPLICATED):
            starts.append(end)
            for table, tiers in maps.items():
                bases[table, kind] = end
                end += -(-tiers.counts[kind] // shares[kind])
        ends = [end] * grid.world_size
        for table, tiers in maps.items():
            owner = tiers.owner % grid.world_size
            bases[table, TABLE_WISE] = ends[owner]
            ends[owner] += tiers.counts[TABLE_WISE]
        return cls(
            grid=grid,
            maps=maps,
            bases=bases,
            node_start=starts[1],
            replicated_start=starts[2],
            whole_start=end,
            stride=max(ends),
            num_local=ends[grid.rank],
        )

    def keys(self, table: str, ids_N: Tensor) -> Tensor:
        """The keys where this rank reads rows: its own copy of a replicated row, its node's copy of a node row."""
        grid, stride, tiers = self.grid, self.stride, self.maps[table]
        kinds_N, slots_N = tiers.split(ids_N)
        keys_N = torch.empty_like(slots_N)
        for kind, count in enumerate(tiers.counts):
            if not count:
                continue
            if kind == GLOBAL:
                found = slots_N % grid.world_size * stride + slots_N // grid.world_size
            elif kind == NODE:
                holder = slots_N % grid.ranks_per_node + grid.node_index * grid.ranks_per_node
                found = holder * stride + slots_N // grid.ranks_per_node
            elif kind == REPLICATED:
                found = grid.rank * stride + slots_N
            else:
                found = tiers.owner % grid.world_size * stride + slots_N
            found = found + self.bases[table, kind]
            keys_N = found if count == tiers.num_rows else torch.where(kinds_N == kind, found, keys_N)
        return keys_N

    def held(self, table: str, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """(positions, local keys) of the rows that this rank has a copy of."""
        keys_N = self.keys(table, rows_N)
        places = (keys_N // max(self.stride, 1) == self.grid.rank).nonzero().squeeze(1)
        return places, keys_N[places] - self.grid.rank * self.stride
