"""Tiered tables as logical ones: initialised, saved, loaded and moved by row id, whichever rank holds the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from recmill.model.stores.interface import InitialRows
from recmill.model.stores.tiered.lookup import RowExchange

# R = requested rows, D = embedding width
CHUNK_ROWS = 1 << 17  # rows sent at once, so that saving needs little memory besides its copy


class TieredState:
    """The TableStore half of a tiered collection. All ranks call every method together."""

    _exchange_of: dict[str, RowExchange]  # by table
    _group: dist.ProcessGroup | None

    def finish(self) -> None:
        """Wait until all gradients sent so far are applied."""
        for exchange in self._exchange_of.values():
            exchange.finish()

    def _begin_change(self) -> None:
        """Before rows change where they are held: copies of a window are no longer what they were."""
        self.finish()
        for exchange in self._exchange_of.values():
            exchange.discard_window()

    @torch.no_grad()
    def start(self, initial_rows: InitialRows) -> None:
        """Set every row to its initial value and clear the optimiser state."""
        self._begin_change()
        for table, exchange in self._exchange_of.items():
            num_rows = exchange.layout.maps[table].num_rows
            for first in range(0, num_rows, CHUNK_ROWS):
                stop = min(first + CHUNK_ROWS, num_rows)
                weights = initial_rows(table, first, stop)
                self._write(table, torch.arange(first, stop), weights, {})
        for exchange in self._exchange_of.values():
            for state in exchange.store.states[0].values():
                state.zero_()

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        """Copies of the logical tables and their optimiser state, each rank holding a block of rows."""
        self.finish()
        tables: dict[str, Any] = {}
        optimiser: dict[str, dict[str, Any]] = {}
        for table, exchange in self._exchange_of.items():
            start, stop = self._block(table)
            block = torch.empty(stop - start, exchange.store.num_columns)
            for first, last in self._chunks(table):
                rows = torch.arange(start + first, start + last)
                block[first:last] = self._fetch(table, rows).cpu()
            weights, states = exchange.store.split(block)
            tables[table] = self._sharded(table, weights.contiguous())
            if states:
                optimiser[table] = {name: self._sharded(table, own.contiguous()) for name, own in states.items()}
        return {"tables": tables, "table_optimiser": optimiser}

    @torch.no_grad()
    def absorb(self, state: Mapping[str, Any]) -> None:
        """Load a state of the form that `state()` returns."""
        self._begin_change()
        for table, exchange in self._exchange_of.items():
            start, _ = self._block(table)
            weights = _local(state["tables"][table])
            saved = state["table_optimiser"].get(table, {})
            columns = exchange.store.join(weights, {name: _local(own) for name, own in saved.items()})
            for first, last in self._chunks(table):
                rows = torch.arange(start + first, start + last)
                shared_rows, shared_columns = self._share(exchange, rows, columns[first:last])
                self._write(table, shared_rows, *exchange.store.split(shared_columns))

    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(weights, {state name: state}) of rows, the same on every rank."""
        self.finish()
        with torch.no_grad():
            return self._exchange_of[table].store.split(self._fetch(table, rows_R))

    @torch.no_grad()
    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows; all ranks pass the same values."""
        self._begin_change()
        self._write(table, rows_R, weights_RD, state)

    def _fetch(self, table: str, rows_R: Tensor) -> Tensor:
        """[R, D + S] of the rows that this rank requests."""
        exchange = self._exchange_of[table]
        request = exchange.request(exchange.layout.keys(table, rows_R.to(exchange.store.device)))
        return exchange.read(request)[request.inverse_N]

    def _write(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        exchange = self._exchange_of[table]
        device = exchange.store.device
        places, keys = exchange.layout.held(table, rows_R.to(device))
        chosen = {name: values.to(device)[places] for name, values in state.items()}
        exchange.store.write(keys, weights_RD.to(device)[places], chosen)

    def _share(self, exchange: RowExchange, rows_R: Tensor, columns_R: Tensor) -> tuple[Tensor, Tensor]:
        """The chunks of all ranks on every rank; each then keeps the rows it holds."""
        grid = exchange.grid
        if grid.world_size == 1:
            return rows_R, columns_R
        counts = grid.swap_counts(grid.world, [len(rows_R)] * grid.world_size, phase="checkpoint")
        send = [len(rows_R)] * grid.world_size
        rows_R, columns_R = rows_R.to(grid.device), columns_R.to(grid.device)
        rows = grid.swap(grid.world, rows_R.repeat(grid.world_size), send=send, receive=counts, phase="checkpoint")
        columns = columns_R.repeat(grid.world_size, 1)
        return rows, grid.swap(grid.world, columns, send=send, receive=counts, phase="checkpoint")

    def _block(self, table: str) -> tuple[int, int]:
        """The range of logical rows that this rank saves."""
        grid = self._exchange_of[table].grid
        num_rows = self._exchange_of[table].layout.maps[table].num_rows
        size = -(-num_rows // grid.world_size)
        return min(grid.rank * size, num_rows), min((grid.rank + 1) * size, num_rows)

    def _chunks(self, table: str) -> Iterator[tuple[int, int]]:
        """Parts of the block: the same number on every rank, some of them empty."""
        grid = self._exchange_of[table].grid
        size = -(-self._exchange_of[table].layout.maps[table].num_rows // grid.world_size)
        start, stop = self._block(table)
        for first in range(0, size, CHUNK_ROWS):
            yield min(first, stop - start), min(first + CHUNK_ROWS, stop - start)

    def _sharded(self, table: str, local: Tensor) -> Any:
        """This rank's block as its shard of the logical table."""
        exchange = self._exchange_of[table]
        if not dist.is_initialized():
            return local
        num_rows, world = exchange.layout.maps[table].num_rows, exchange.grid.world_size
        size = -(-num_rows // world)
        rest = list(local.shape[1:])
        shards = [
            ShardMetadata(
                shard_offsets=[rank * size, *(0 for _ in rest)],
                shard_sizes=[min(size, num_rows - rank * size), *rest],
                placement=f"rank:{rank}/cpu",
            )
            for rank in range(world)
            if rank * size < num_rows
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=torch.Size([num_rows, *rest]),
            tensor_properties=TensorProperties(dtype=local.dtype),
        )
        mine = [Shard(tensor=local, metadata=shards[exchange.grid.rank])] if len(local) else []
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            mine, sharded_tensor_metadata=metadata, process_group=self._group
        )


def _local(value: Any) -> Tensor:
    """This rank's block of a logical table."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        if shards:
            return shards[0].tensor
        return torch.empty(0, *value.size()[1:])
    tensor: Tensor = value
    return tensor
