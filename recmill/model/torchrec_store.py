"""TorchRec's sharded tables as a TableStore: rows move in and out of the shards, whoever holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recmill.model.table_store import InitialRows

# R = rows asked for, D = embedding width
START_BLOCK = 1 << 20


class TorchRecStore:
    """Tables of a DistributedModelParallel, by their ShardedTensors, whose local shards are views of the live rows.

    `weights` maps a table to its ShardedTensor, `optimiser_state` a table to {state name: ShardedTensor} (what
    `ShardedModel.table_weights` and `table_optimiser_state` give). Table-wise and row-wise shards are held whole in
    their columns; of column-wise ones only weights and element-wise state can be moved.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        optimiser_state: Mapping[str, Mapping[str, Any]],
        *,
        state_names: tuple[str, ...] = ("momentum1",),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._weights, self._state = dict(weights), {name: dict(own) for name, own in optimiser_state.items()}
        self._state_names, self._group = state_names, process_group
        self._wide: dict[tuple[str, str], bool] = {}

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @torch.no_grad()
    def start(self, initial_rows: InitialRows) -> None:
        """Give every local row the value a fresh run starts from, and clear the optimiser state."""
        for table, weight in self._weights.items():
            for shard in weight.local_shards():
                first, column = shard.metadata.shard_offsets
                num_rows, width = shard.metadata.shard_sizes
                for start in range(first, first + num_rows, START_BLOCK):
                    stop = min(start + START_BLOCK, first + num_rows)
                    rows = initial_rows(table, start, stop)
                    shard.tensor[start - first : stop - first].copy_(rows[:, column : column + width])
            for state in self._state.get(table, {}).values():
                for shard in state.local_shards():
                    shard.tensor.zero_()

    def state(self) -> dict[str, Any]:
        """Weights and optimiser state as ShardedTensors over logical rows."""
        return {"tables": dict(self._weights), "table_optimiser": {k: dict(v) for k, v in self._state.items() if v}}

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: a checkpoint is read into the live shards."""

    @torch.no_grad()
    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows by id on every rank, sent by the ranks that hold them."""
        weight = self._weights[table]
        dim = int(weight.metadata().size[1])
        found = {"": self._collect(weight, weight, rows_R, (len(rows_R), dim))}
        for name in self._state_names:
            local = self._state.get(table, {}).get(name)
            shape = self._state_shape(table, name, rows_R, dim)
            found[name] = self._collect(weight, local, rows_R, shape)
        return found.pop(""), found

    @torch.no_grad()
    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows into the shards that this rank holds."""
        _write(self._weights[table], rows_R, weights_RD)
        for name, values in state.items():
            local = self._state.get(table, {}).get(name)
            if local is not None:
                _write(local, rows_R, values)

    @torch.no_grad()
    def find_changed(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Places in `rows_R` whose rows differ from those given, by a bit or more; the same on every rank."""
        differs = torch.zeros(len(rows_R), dtype=torch.uint8)
        held = {"": weights_RD, **state}
        for name, values in held.items():
            source = self._weights[table] if not name else self._state.get(table, {}).get(name)
            for shard in source.local_shards() if source is not None else ():
                place, local, columns = _overlap(shard, rows_R)
                own = values[place] if columns is None else values[place][:, columns]
                live = shard.tensor[local].to(own.device)
                unequal = live.view(torch.int32) != own.contiguous().view(torch.int32)
                differs[place] |= (unequal.any(1) if unequal.dim() > 1 else unequal).to(torch.uint8).cpu()
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self._group)
        return differs.nonzero().squeeze(1)

    def _state_shape(self, table: str, name: str, rows_R: Tensor, dim: int) -> tuple[int, ...]:
        # TorchRec names the state of local tables only, so ranks that hold nothing learn its form from one that does.
        if (table, name) not in self._wide:
            local = self._state.get(table, {}).get(name)
            flag = torch.tensor([int(local is not None and len(local.metadata().size) == 2)])
            if dist.is_initialized() and dist.get_world_size(self._group) > 1:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            self._wide[table, name] = bool(flag)
        return (len(rows_R), dim) if self._wide[table, name] else (len(rows_R),)

    def _collect(self, weight: Any, source: Any, rows_R: Tensor, shape: tuple[int, ...]) -> Tensor:
        device = rows_R.device
        found = torch.zeros(shape, dtype=torch.float32, device=device)
        if source is not None:
            for shard in source.local_shards():
                place, local, columns = _overlap(shard, rows_R)
                values = shard.tensor[local].to(device)
                if columns is None:
                    found[place] = values
                else:
                    found[place, columns] = values
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return found
        owners = {shard.placement.rank() for shard in weight.metadata().shards_metadata}
        if len(owners) == 1:
            source_rank = owners.pop()
            dist.broadcast(found, src=source_rank, group=self._group)
            return found
        # Every element is held once and is zero elsewhere; added up as integers, so that no bit changes (-0.0 + 0.0).
        dist.all_reduce(found.view(torch.int32), group=self._group)
        return found


def _overlap(shard: Any, rows_R: Tensor) -> tuple[Tensor, Tensor, slice | None]:
    """Which of the asked rows a shard holds: their places in the answer, in the shard, and the columns it has."""
    offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    first, count = int(offsets[0]), int(sizes[0])
    place = ((rows_R >= first) & (rows_R < first + count)).nonzero().squeeze(1)
    local = (rows_R[place] - first).to(shard.tensor.device)
    columns = slice(int(offsets[1]), int(offsets[1] + sizes[1])) if len(offsets) == 2 else None
    return place, local, columns


def _write(target: Any, rows_R: Tensor, values: Tensor) -> None:
    for shard in target.local_shards():
        place, local, columns = _overlap(shard, rows_R)
        chosen = values[place] if columns is None else values[place][:, columns]
        shard.tensor.index_copy_(0, local, chosen.to(shard.tensor.device))
