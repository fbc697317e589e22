"""The rows of one width that a rank holds: all tiers of all tables in one FBGEMM table, one part after another.

    key on a rank:   0 ... global | node | replicated | table_wise ... stride
    key anywhere:    rank * stride + key on that rank

The parts before `table_wise` are as long on every rank, so a rank can tell where another one keeps a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from recmill.artifacts import InputError
from recmill.model.stores.fbgemm import place_on, step_options
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.tiered.exchange import Grid
from recmill.model.stores.tiered.tier_map import GLOBAL, NODE, REPLICATED, TABLE_WISE, TierMap

# N = ids, K = keys, D = embedding width, S = columns of optimiser state


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which key every row of some tables has on the ranks that hold it."""

    grid: Grid
    maps: Mapping[str, TierMap]
    bases: Mapping[tuple[str, int], int]  # (table, kind) -> its first key on a rank
    node_start: int
    replicated_start: int
    whole_start: int
    stride: int  # keys of the fullest rank
    num_local: int  # keys of this rank

    @classmethod
    def of(cls, maps: Mapping[str, TierMap], grid: Grid) -> Layout:
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
        """Where this rank reads rows: its own copy of a replicated one, its node's copy of a node's."""
        kinds_N, slots_N = self.maps[table].split(ids_N)
        return self._keys_on(table, kinds_N, slots_N, self.grid.node_index, self.grid.rank)

    def _keys_on(self, table: str, kinds_N: Tensor, slots_N: Tensor, node: int, rank: int) -> Tensor:
        grid, stride = self.grid, self.stride
        counts = self.maps[table].counts
        keys_N = torch.empty_like(slots_N)
        for kind, count in enumerate(counts):
            if not count:
                continue
            if kind == GLOBAL:
                found = slots_N % grid.world_size * stride + slots_N // grid.world_size
            elif kind == NODE:
                holder = slots_N % grid.ranks_per_node + node * grid.ranks_per_node
                found = holder * stride + slots_N // grid.ranks_per_node
            elif kind == REPLICATED:
                found = rank * stride + slots_N
            else:
                found = self.maps[table].owner % grid.world_size * stride + slots_N
            found = found + self.bases[table, kind]
            keys_N = found if count == self.maps[table].num_rows else torch.where(kinds_N == kind, found, keys_N)
        return keys_N

    def held(self, table: str, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """(positions, local keys) of the rows that this rank has a copy of."""
        keys_N = self.keys(table, rows_N)
        places = (keys_N // max(self.stride, 1) == self.grid.rank).nonzero().squeeze(1)
        return places, keys_N[places] - self.grid.rank * self.stride


class RowStore:
    """The local keys of a layout: weights and optimiser state, looked up and updated by FBGEMM."""

    def __init__(self, num_keys: int, dim: int, *, optimiser: TableOptimiser, device: torch.device) -> None:
        if dim % 4:
            raise InputError(f"embedding width is {dim}, FBGEMM's tables want a multiple of 4")
        self.dim, self.device = dim, device
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(max(num_keys, 1), dim, *place_on(device))],
            pooling_mode=PoolingMode.NONE,
            device=device,
            **step_options(optimiser),
        )
        self.num_keys = num_keys
        self.weights: Tensor = self._tables.split_embedding_weights()[0].detach()
        states: Sequence[Sequence[Tensor]] = self._tables.split_optimizer_states()
        self.state: dict[str, Tensor] = dict(zip(optimiser.state_names, states[0], strict=True)) if states else {}
        self.weights.zero_()

    def lookup(self, keys_K: Tensor) -> Tensor:
        """[K, D] weights."""
        with torch.no_grad():
            rows_KD: Tensor = self._tables(keys_K, self._offsets(keys_K))
        return rows_KD

    def update(self, keys_K: Tensor, gradients_KD: Tensor) -> None:
        """One step of the optimiser on rows, each key once."""
        if len(keys_K):
            with torch.enable_grad():
                self._tables(keys_K, self._offsets(keys_K)).backward(gradients_KD)

    def set_lr(self, lr: float) -> None:
        self._tables.set_learning_rate(lr)

    def _offsets(self, keys_K: Tensor) -> Tensor:
        return keys_K.new_tensor([0, len(keys_K)])

    @property
    def num_columns(self) -> int:
        """Floats of a row with its optimiser state."""
        return self.dim + sum(_columns(state) for state in self.state.values())

    def read(self, keys_K: Tensor) -> Tensor:
        """[K, D + S]: weights with optimiser state."""
        state = [values[keys_K].view(len(keys_K), _columns(values)) for values in self.state.values()]
        return torch.cat([self.weights[keys_K], *state], dim=1)

    def part(self, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What `read` gave, as (weights, {state name: one number or one vector a row})."""
        widths = [self.dim, *(_columns(state) for state in self.state.values())]
        weights, *rest = torch.split(columns, widths, dim=1)
        shaped = {
            name: values.squeeze(1) if self.state[name].dim() == 1 else values
            for name, values in zip(self.state, rest, strict=True)
        }
        return weights, shaped

    def write(self, keys_K: Tensor, weights_KD: Tensor, state: Mapping[str, Tensor]) -> None:
        self.weights[keys_K] = weights_KD.to(self.weights)
        for name, values in state.items():
            if name in self.state:
                self.state[name][keys_K] = values.to(self.state[name])

    @property
    def size_in_bytes(self) -> int:
        return self.weights.nbytes + sum(state.nbytes for state in self.state.values())


def _columns(state: Tensor) -> int:
    return 1 if state.dim() == 1 else state.shape[1]
