"""TorchRec's sharded tables as a TableStore: rows move in and out of the shards of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import move_rows
from recmill.model.stores.collectives import world_size
from recmill.model.stores.hot.swap import HeldShard, exchange_changes
from recmill.model.stores.interface import InitialRows, Replica

# R = requested rows, D = embedding width
START_BLOCK = 1 << 20


class TorchRecStore:
    """Tables of a DistributedModelParallel, by their ShardedTensors, whose local shards are views of the live rows.

    `weights` maps a table to its ShardedTensor, `optimiser_state` a table to {state name: ShardedTensor}. Shards hold
    whole rows: plans are table-wise or row-wise.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        optimiser_state: Mapping[str, Mapping[str, Any]],
        *,
        state_names: tuple[str, ...] = ("momentum1",),
        optimiser: torch.optim.Optimizer | None = None,
    ) -> None:
        self._weights, self._state = dict(weights), {name: dict(own) for name, own in optimiser_state.items()}
        self._state_names, self._optimiser = state_names, optimiser
        self._wide: dict[tuple[str, str], bool] = {}
        self._overlaps: dict[tuple[str, int, int], tuple[Tensor, Tensor | None, Tensor]] = {}

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._weights)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that begin from now on."""
        assert self._optimiser is not None, "the store was built without the tables' optimiser"
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()  # a fused optimiser passes the rate to its tables here

    @torch.no_grad()
    def start(self, initial_rows: InitialRows) -> None:
        """Set every local row to its initial value and clear the optimiser state."""
        for table, weight in self._weights.items():
            for shard in weight.local_shards():
                first, num_rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                for start in range(first, first + num_rows, START_BLOCK):
                    stop = min(start + START_BLOCK, first + num_rows)
                    shard.tensor[start - first : stop - first].copy_(initial_rows(table, start, stop))
            for state in self._state.get(table, {}).values():
                for shard in state.local_shards():
                    shard.tensor.zero_()

    def state(self) -> dict[str, Any]:
        """Weights and optimiser state as ShardedTensors over logical rows."""
        return {"tables": dict(self._weights), "table_optimiser": {k: dict(v) for k, v in self._state.items() if v}}

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: checkpoints are read into the live shards."""

    @torch.no_grad()
    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows by id on every rank, sent by the ranks that hold them."""
        dim = int(self._weights[table].metadata().size[1])
        weights = self._collect(table, "", rows_R, (len(rows_R), dim))
        shapes = {name: self._state_shape(table, name, rows_R, dim) for name in self._state_names}
        return weights, {name: self._collect(table, name, rows_R, shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows into the shards that this rank holds."""
        for name, values in (("", weights_RD), *state.items()):
            for shard in self._shards(table, name):
                place, local = self._overlap(table, shard, rows_R)
                move_rows(values, shard.tensor, source_rows_N=place, target_rows_N=local)

    @torch.no_grad()
    def refresh(self, replicas: Mapping[str, Replica]) -> None:
        """Update copies of rows on all ranks, with one exchange for all tables.

        Replicas are equal on all ranks, so the rank that holds a row compares it with its own copy and sends it if they
        differ.
        """
        if world_size(None) == 1:
            for table, own in replicas.items():
                for live, held, place, local in self._pairs(table, own):
                    for source, target in zip(live, held, strict=True):
                        move_rows(source, target, source_rows_N=local, target_rows_N=place)
            return
        exchange_changes(
            {table: own.parts for table, own in replicas.items()},
            {table: self._pairs(table, own) for table, own in replicas.items()},
            None,
        )

    def _pairs(self, table: str, own: Replica) -> list[HeldShard]:
        """This rank's shards of a replicated table: weights and state paired with their copies."""
        found = []
        for number, shard in enumerate(self._shards(table, "")):
            place, local = self._overlap(table, shard, own.rows_H)
            live = [shard.tensor, *(self._shards(table, name)[number].tensor for name in own.state)]
            found.append(HeldShard(live=live, held=own.parts, place=place, local=local))
        return found

    def _shards(self, table: str, name: str) -> list[Any]:
        """This rank's shards of a table's weights (name "") or of a state, in the order of their rows."""
        held = self._weights[table] if not name else self._state.get(table, {}).get(name)
        shards = [] if held is None else held.local_shards()
        return sorted(shards, key=lambda shard: tuple(shard.metadata.shard_offsets))

    def _overlap(self, table: str, shard: Any, rows_R: Tensor) -> tuple[Tensor | None, Tensor]:
        """The rows that a shard holds: (positions in `rows_R` or None for all, positions in the shard).

        Cached for the rows requested last: hot rows are the same at every swap.
        """
        first, count = int(shard.metadata.shard_offsets[0]), int(shard.metadata.shard_sizes[0])
        known = self._overlaps.get((table, first, count))
        if known is None or known[0] is not rows_R:
            place = ((rows_R >= first) & (rows_R < first + count)).nonzero().squeeze(1)
            local = (rows_R[place] - first).to(shard.tensor.device)
            known = (rows_R, None if len(place) == len(rows_R) else place, local)
            self._overlaps[table, first, count] = known
        return known[1:]

    def _state_shape(self, table: str, name: str, rows_R: Tensor, dim: int) -> tuple[int, ...]:
        # TorchRec knows the state of local tables only, so ranks that hold nothing learn its shape from one that does.
        if (table, name) not in self._wide:
            local = self._state.get(table, {}).get(name)
            flag = torch.tensor([int(local is not None and len(local.metadata().size) == 2)])
            if world_size(None) > 1:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._wide[table, name] = bool(flag)
        return (len(rows_R), dim) if self._wide[table, name] else (len(rows_R),)

    def _collect(self, table: str, name: str, rows_R: Tensor, shape: tuple[int, ...]) -> Tensor:
        found = torch.zeros(shape, dtype=torch.float32, device=rows_R.device)
        for shard in self._shards(table, name):
            place, local = self._overlap(table, shard, rows_R)
            move_rows(shard.tensor, found, source_rows_N=local, target_rows_N=place)
        if world_size(None) == 1:
            return found
        owners = {shard.placement.rank() for shard in self._weights[table].metadata().shards_metadata}
        if len(owners) == 1:
            dist.broadcast(found, src=owners.pop())
            return found
        # Each element is held by one rank and zero elsewhere; summed as integers, so that no bit changes (-0.0 + 0.0).
        dist.all_reduce(found.view(torch.int32))
        return found
