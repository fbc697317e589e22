"""Embedding tables larger than memory: hot rows in memory, all others on disk, the next batches' rows read ahead.

    ids of a batch --> hot?  slot in memory, always there
                  \\-> cold: distinct rows, read from disk into places behind the hot rows
                                       |
         FBGEMM table:  [ hot rows | rows of this batch ]   lookup and fused update as for any other table
                                       |
                        after the update the batch's rows go back to disk, by the thread that reads ahead

On CUDA the same purpose is served by TorchRec's own cache over host memory: see uvm_caching.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec import EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, PoolingType

from recmill.artifacts import InputError, module_name
from recmill.data.hot.remap import HotRemap
from recmill.model.stores.disk.rows import BLOCK_ROWS, DiskRows, IdArray, RowBlocks
from recmill.model.stores.hot.collection import PooledRows
from recmill.model.stores.hot.tables import FusedTables
from recmill.model.stores.interface import InitialRows, TableOptimiser

# R = rows, U = distinct cold rows of a batch, N = ids, D = embedding width, S = floats of state a row
T = TypeVar("T")
CAPACITY = 1 << 15
EAGER_ROWS = 1 << 22  # a table up to this size starts from the run's own initial rows; a larger one from hashed ones


@dataclass(kw_only=True, eq=False)
class _Fetched:
    """Rows of one batch of one table on their way into memory."""

    slots_N: Tensor  # where each id will be found
    rows_U: IdArray
    values: Tensor  # [U, D + S]
    num_writes: int  # writes that were queued before the read was: later ones must be added


class _DiskTable:
    """One table: its file, its hot rows and the rows of the batch at hand."""

    def __init__(self, config: Any, hot_rows: Tensor, *, rows: DiskRows, optimiser: TableOptimiser) -> None:
        self.config, self.rows, self.optimiser = config, rows, optimiser
        self.hot_rows = hot_rows.numpy().astype(np.int64)
        self.remap = HotRemap({"": self.hot_rows}, {"": config.num_embeddings})
        self.pooling = "none"
        if isinstance(config, EmbeddingBagConfig):
            self.pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
        self.capacity, self.state_width = 0, rows.width - rows.dim
        self.recent: deque[tuple[int, IdArray, Tensor]] = deque()  # number, rows and values of writes
        self.num_writes = 0
        self._grow(CAPACITY)
        self.load_hot()

    def _grow(self, capacity: int) -> None:
        held = self._memory(len(self.hot_rows)) if self.capacity else None
        self.capacity = capacity
        self.tables = FusedTables(
            [len(self.hot_rows) + capacity],
            [0] * len(self.config.feature_names),
            dim=self.config.embedding_dim,
            pooling=self.pooling,
            optimiser=self.optimiser,
            device=torch.device("cpu"),
        )
        self.weights, self.state = self.tables.weights(0), list(self.tables.state(0).values())
        if held is not None:
            self._place(0, held)

    def set_lr(self, lr: float) -> None:
        self.optimiser = replace(self.optimiser, lr=lr)  # for tables that are made larger
        self.tables.set_lr(lr)

    def _memory(self, stop: int, start: int = 0) -> Tensor:
        """[stop - start, D + S] copied from memory."""
        parts = [
            self.weights[start:stop],
            *(own[start:stop].reshape(stop - start, self.state_width) for own in self.state),
        ]
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def _place(self, start: int, values: Tensor) -> None:
        dim, stop = self.config.embedding_dim, start + len(values)
        self.weights[start:stop] = values[:, :dim]
        for own in self.state:
            own[start:stop] = values[:, dim:].reshape(-1, *own.shape[1:])

    def load_hot(self) -> None:
        for start in range(0, len(self.hot_rows), BLOCK_ROWS):
            self._place(start, self.rows.read(self.hot_rows[start : start + BLOCK_ROWS]))

    def save_hot(self) -> None:
        for start in range(0, len(self.hot_rows), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(self.hot_rows))
            self.rows.write(self.hot_rows[start:stop], self._memory(stop, start))

    def read_rows(self, rows_R: IdArray) -> Tensor:
        """[R, D + S] of any rows: hot ones from memory, where their live values are."""
        found = self.rows.read(rows_R)
        slots = self.remap.slots("", rows_R)
        hot = np.flatnonzero(slots >= 0)
        where = torch.from_numpy(slots[hot].astype(np.int64))
        parts = [self.weights[where], *(own[where].reshape(len(hot), self.state_width) for own in self.state)]
        found[torch.from_numpy(hot)] = torch.cat(parts, dim=1)
        return found

    @torch.no_grad()
    def write_rows(self, rows_R: IdArray, values: Tensor) -> None:
        slots = self.remap.slots("", rows_R)
        cold, hot = np.flatnonzero(slots < 0), np.flatnonzero(slots >= 0)
        self.rows.write(rows_R[cold], values[torch.from_numpy(cold)])
        where, chosen = torch.from_numpy(slots[hot].astype(np.int64)), values[torch.from_numpy(hot)]
        self.weights[where] = chosen[:, : self.rows.dim]
        for own in self.state:
            own[where] = chosen[:, self.rows.dim :].reshape(-1, *own.shape[1:])

    def fetch(self, ids_N: IdArray, num_writes: int) -> _Fetched:
        """Read what a batch needs (in the thread that does all reading and writing)."""
        slots_N = self.remap.slots("", ids_N).astype(np.int64)
        cold = slots_N < 0
        rows_U, inverse = np.unique(ids_N[cold], return_inverse=True)
        slots_N[cold] = len(self.hot_rows) + inverse
        values = self.rows.read(rows_U)
        return _Fetched(slots_N=torch.from_numpy(slots_N), rows_U=rows_U, values=values, num_writes=num_writes)

    def install(self, fetched: _Fetched) -> None:
        """Put a batch's rows behind the hot ones, with what was written since they were read."""
        for number, rows, values in self.recent:
            if number >= fetched.num_writes and len(rows) and len(fetched.rows_U):
                place = np.minimum(np.searchsorted(rows, fetched.rows_U), len(rows) - 1)
                same = np.flatnonzero(rows[place] == fetched.rows_U)
                fetched.values[torch.from_numpy(same)] = values[torch.from_numpy(place[same])]
        if len(fetched.rows_U) > self.capacity:
            self._grow(max(len(fetched.rows_U), 2 * self.capacity))
        self._place(len(self.hot_rows), fetched.values)

    def collect(self, fetched: _Fetched) -> Tensor:
        """The batch's rows after the update, noted as the newest write."""
        first = len(self.hot_rows)
        values = self._memory(first + len(fetched.rows_U), first)
        self.recent.append((self.num_writes, fetched.rows_U, values))
        self.num_writes += 1
        return values

    def forget_writes(self, before: int) -> None:
        while self.recent and self.recent[0][0] < before:
            self.recent.popleft()


@dataclass(kw_only=True, eq=False)
class _Reading:
    """A batch whose rows are being read."""

    ids: KeyedJaggedTensor
    fetched: dict[str, Future[_Fetched]]
    num_writes: dict[str, int]


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: Tensor, finish: Any) -> Tensor:
        ctx.finish = finish
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.finish(gradients[0])
        return None, None, None


class DiskStore(nn.Module):
    """Tables on disk that are looked up, trained, saved and loaded as any others, in one process.

    `tables` are TorchRec configs, all pooled or all looked up row by row; `hot_rows` maps a table to the rows that stay
    in memory (none by default). `prefetch(ids)` starts to read what a coming batch needs; batches are then looked up in
    the order in which they were prefetched. One batch is trained at a time: backward before the next lookup.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        folder: str | Path,
        optimiser: TableOptimiser,
        hot_rows: Mapping[str, Tensor] | None = None,
        scale: float = 0.01,
        seed: int = 0,
        resident_bytes: int = 256 * 2**20,
    ) -> None:
        super().__init__()
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError("tables on disk belong to one process; with several ranks shard them over the ranks")
        given = dict(hot_rows or {})
        logical = {module_name(name): name for name in given}
        self.is_pooled = isinstance(tables[0], EmbeddingBagConfig)
        self._tables: dict[str, _DiskTable] = {}
        for config in tables:
            name = logical.get(config.name, config.name)
            state_width = {"sgd": 0, "adagrad": config.embedding_dim, "rowwise_adagrad": 1}[optimiser.kind]
            rows = DiskRows(
                Path(folder) / f"{name}.rows",
                num_rows=config.num_embeddings,
                dim=config.embedding_dim,
                state_width=state_width,
                scale=scale,
                seed=seed + len(self._tables),
                resident_bytes=resident_bytes,
            )
            hot = given.get(name, torch.empty(0, dtype=torch.int64))
            self._tables[name] = _DiskTable(config, hot, rows=rows, optimiser=optimiser)
        self.optimiser = optimiser
        self._reader = (ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk-rows"),)
        self._ahead: deque[_Reading] = deque()
        self._writes: deque[Future[None]] = deque()
        self.anchor = torch.zeros((), requires_grad=True)

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._tables)

    def prefetch(self, ids: KeyedJaggedTensor) -> None:
        """Start to read the rows of a batch that will be looked up soon."""
        self._ahead.append(self._start_reading(ids))

    def _start_reading(self, ids: KeyedJaggedTensor) -> _Reading:
        reading = _Reading(ids=ids, fetched={}, num_writes={})
        for name, table in self._tables.items():
            reading.num_writes[name] = table.num_writes
            values, _ = _values_of(ids, table.config)
            reading.fetched[name] = self._reader[0].submit(table.fetch, values, table.num_writes)
        return reading

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        is_ahead = bool(self._ahead) and self._ahead[0].ids is ids
        reading = self._ahead.popleft() if is_ahead else self._start_reading(ids)
        found: dict[str, Any] = {}
        for name, table in self._tables.items():
            fetched = reading.fetched[name].result()
            table.install(fetched)
            # Writes older than every read under way are on disk for all of them.
            table.forget_writes(min((own.num_writes[name] for own in self._ahead), default=table.num_writes))
            found |= self._look_up(table, fetched, ids)
        return PooledRows(found) if self.is_pooled else found

    def _look_up(self, table: _DiskTable, fetched: _Fetched, ids: KeyedJaggedTensor) -> dict[str, Any]:
        _, lengths = _values_of(ids, table.config)
        offsets = pad(lengths.long().cumsum(0), (1, 0))
        rows = table.tables.look_up(fetched.slots_N, offsets)
        if torch.is_grad_enabled():

            def finish(gradient: Tensor) -> None:
                table.tables.update(fetched.slots_N, offsets, gradient)
                self._write_back(table, fetched)

            rows = _Update.apply(self.anchor, rows, finish)  # type: ignore[no-untyped-call]
        names = table.config.feature_names
        if self.is_pooled:
            return dict(zip(names, torch.split(rows, table.config.embedding_dim, dim=1), strict=True))
        per_feature = lengths.view(len(names), -1)
        pieces = torch.split(rows, per_feature.sum(1).tolist())
        return {
            name: JaggedTensor(values=own, lengths=own_lengths)
            for name, own, own_lengths in zip(names, pieces, per_feature, strict=True)
        }

    def _write_back(self, table: _DiskTable, fetched: _Fetched) -> None:
        values = table.collect(fetched)
        self._writes.append(self._reader[0].submit(table.rows.write, fetched.rows_U, values))
        while len(self._writes) > 2 * len(self._tables):
            self._writes.popleft().result()

    def _in_reader(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work on the files: one thread does all of it, in order."""
        return self._reader[0].submit(work, *arguments).result()

    def flush(self) -> None:
        """Wait until the rows of all batches so far are on disk; hot rows stay in memory."""
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        self.flush()
        self._reader[0].shutdown()
        for table in self._tables.values():
            table.rows.close()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that begin from now on."""
        for table in self._tables.values():
            table.set_lr(lr)

    def start(self, initial_rows: InitialRows) -> None:
        """Every row as a fresh run starts it; of tables above EAGER_ROWS rows, hashed ones of the same spread."""
        self.flush()
        self._ahead.clear()
        for name, table in self._tables.items():
            self._in_reader(_start_rows, table.rows, name, initial_rows)
            table.forget_writes(table.num_writes)
            self._in_reader(table.load_hot)

    def state(self) -> dict[str, Any]:
        """All rows in blocks of the files. Rows nobody touched are written for it: the files take their full size."""
        self.flush()
        weights: dict[str, RowBlocks] = {}
        state: dict[str, dict[str, RowBlocks]] = {}
        for name, table in self._tables.items():
            self._in_reader(table.save_hot)
            whole, dim = self._in_reader(table.rows.fill), table.rows.dim
            weights[name] = whole[:, :dim].as_subclass(RowBlocks)
            if self.optimiser.state_names:
                own = whole[:, dim] if self.optimiser.kind == "rowwise_adagrad" else whole[:, dim:]
                state[name] = {self.optimiser.state_names[0]: own.as_subclass(RowBlocks)}
        return {"tables": weights, "table_optimiser": state}

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Take over rows that were read into what `state()` gave, or into tensors or blocks of the same form."""
        self._ahead.clear()
        for name, table in self._tables.items():
            weights, own = state["tables"][name], state["table_optimiser"].get(name, {})
            if weights.data_ptr() == table.rows.address:  # a checkpoint was read into our file
                table.forget_writes(table.num_writes)
                self._in_reader(table.load_hot)
                continue
            for begin in range(0, table.rows.num_rows, BLOCK_ROWS):
                rows = torch.arange(begin, min(begin + BLOCK_ROWS, table.rows.num_rows))
                self.put_rows(name, rows, weights[rows], {key: value[rows] for key, value in own.items()})

    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.flush()
        own = self._tables[table]
        found, dim = self._in_reader(own.read_rows, rows_R.numpy()), own.rows.dim
        is_one = self.optimiser.kind == "rowwise_adagrad"
        state = dict.fromkeys(self.optimiser.state_names, found[:, dim] if is_one else found[:, dim:])
        return found[:, :dim], state

    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        self.flush()
        self._ahead.clear()  # what was read ahead may be among these rows: it is read again
        own = self._tables[table]
        own.forget_writes(own.num_writes)
        parts = [
            weights_RD,
            *(state[name].reshape(len(rows_R), own.state_width) for name in self.optimiser.state_names),
        ]
        self._in_reader(own.write_rows, rows_R.numpy(), torch.cat(parts, dim=1))


def _start_rows(rows: DiskRows, name: str, initial_rows: InitialRows) -> None:
    rows.clear()
    if rows.num_rows > EAGER_ROWS:
        rows.scale = float(initial_rows(name, 0, 1024).abs().max())
        return
    for begin in range(0, rows.num_rows, BLOCK_ROWS):
        drawn = initial_rows(name, begin, min(begin + BLOCK_ROWS, rows.num_rows))
        rows.write(np.arange(begin, begin + len(drawn)), pad(drawn, (0, rows.width - rows.dim)))


def _values_of(ids: KeyedJaggedTensor, config: Any) -> tuple[IdArray, Tensor]:
    """Ids and lengths of a table's features, one feature after another."""
    keys, edges, stride = ids.keys(), ids.offset_per_key(), ids.stride()
    places = [keys.index(name) for name in config.feature_names]
    values = torch.cat([ids.values()[edges[p] : edges[p + 1]] for p in places])
    return values.numpy(), torch.cat([ids.lengths()[p * stride : (p + 1) * stride] for p in places])
