"""Embedding tables larger than memory: hot rows in memory, all others on disk, with read-ahead for coming batches.

    ids of a batch --> hot:  slot in memory, always there
                  \\-> cold: distinct rows, read from disk into slots behind the hot rows
                                       |
         FBGEMM table:  [ hot rows | rows of this batch ]   lookup and fused update as for any other table
                                       |
                        after the update, the read-ahead thread writes the batch's rows back to disk

On CUDA, TorchRec's own cache over host memory does the same job: see uvm_caching.py.
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
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from recmill.artifacts import InputError, module_name
from recmill.data.hot.remap import HotRemap
from recmill.model.stores.disk.rows import BLOCK_ROWS, DiskRows, IdArray, RowBlocks
from recmill.model.stores.fbgemm import FusedTables
from recmill.model.stores.interface import InitialRows, TableOptimiser
from recmill.model.stores.lookups import HandOver, PooledRows, answer_rows, pick_lists, pooling_of

# R = rows, U = distinct cold rows of a batch, N = ids, D = embedding width, S = floats of state per row
T = TypeVar("T")
CAPACITY = 1 << 15
EAGER_ROWS = 1 << 22  # larger tables start from hashed rows instead of the run's initial rows


@dataclass(kw_only=True, eq=False)
class _Fetched:
    """Rows of one table that one batch needs, read from disk."""

    slots_N: Tensor  # the slot of each id
    rows_U: IdArray
    values: Tensor  # [U, D + S]
    num_writes: int  # writes queued before the read: later ones must be merged in


class _DiskTable:
    """One table: its file, its hot rows and the rows of the current batch."""

    def __init__(self, config: Any, hot_rows: Tensor, *, rows: DiskRows, optimiser: TableOptimiser) -> None:
        self.config, self.rows, self.optimiser = config, rows, optimiser
        self.hot_rows = hot_rows.numpy().astype(np.int64)
        self.remap = HotRemap({"": self.hot_rows}, {"": config.num_embeddings})
        self.capacity = 0
        self.recent: deque[tuple[int, IdArray, Tensor]] = deque()  # number, rows and values of writes
        self.num_writes = 0
        self._grow(CAPACITY)
        self.load_hot()

    def _grow(self, capacity: int) -> None:
        held: Tensor | None = self.memory.read(slice(len(self.hot_rows))) if self.capacity else None
        self.capacity = capacity
        self.memory: FusedTables = FusedTables(
            [len(self.hot_rows) + capacity],
            [0] * len(self.config.feature_names),
            dim=self.config.embedding_dim,
            pooling=pooling_of(self.config),
            optimiser=self.optimiser,
            device=torch.device("cpu"),
        )
        if held is not None:
            self._place(0, held)

    def set_lr(self, lr: float) -> None:
        self.optimiser = replace(self.optimiser, lr=lr)  # for when the table grows
        self.memory.set_lr(lr)

    def _place(self, start: int, values: Tensor) -> None:
        """Write rows of the file ([R, D + S]) to consecutive slots in memory."""
        self.memory.write(slice(start, start + len(values)), *self.memory.split(values))

    def load_hot(self) -> None:
        for start in range(0, len(self.hot_rows), BLOCK_ROWS):
            self._place(start, self.rows.read(self.hot_rows[start : start + BLOCK_ROWS]))

    def save_hot(self) -> None:
        for start in range(0, len(self.hot_rows), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(self.hot_rows))
            self.rows.write(self.hot_rows[start:stop], self.memory.read(slice(start, stop)))

    def read_rows(self, rows_R: IdArray) -> Tensor:
        """[R, D + S] of any rows: hot ones from memory, which has their live values."""
        found = self.rows.read(rows_R)
        slots = self.remap.slots("", rows_R)
        hot = np.flatnonzero(slots >= 0)
        found[torch.from_numpy(hot)] = self.memory.read(torch.from_numpy(slots[hot].astype(np.int64)))
        return found

    def write_rows(self, rows_R: IdArray, values: Tensor) -> None:
        slots = self.remap.slots("", rows_R)
        cold, hot = np.flatnonzero(slots < 0), np.flatnonzero(slots >= 0)
        self.rows.write(rows_R[cold], values[torch.from_numpy(cold)])
        where = torch.from_numpy(slots[hot].astype(np.int64))
        self.memory.write(where, *self.memory.split(values[torch.from_numpy(hot)]))

    def fetch(self, ids_N: IdArray, num_writes: int) -> _Fetched:
        """Read the rows of a batch (in the thread that does all reading and writing)."""
        slots_N = self.remap.slots("", ids_N).astype(np.int64)
        cold = slots_N < 0
        rows_U, inverse = np.unique(ids_N[cold], return_inverse=True)
        slots_N[cold] = len(self.hot_rows) + inverse
        values = self.rows.read(rows_U)
        return _Fetched(slots_N=torch.from_numpy(slots_N), rows_U=rows_U, values=values, num_writes=num_writes)

    def install(self, fetched: _Fetched) -> None:
        """Place a batch's rows behind the hot ones, merged with what was written since they were read."""
        for number, rows, values in self.recent:
            if number >= fetched.num_writes and len(rows) and len(fetched.rows_U):
                place = np.minimum(np.searchsorted(rows, fetched.rows_U), len(rows) - 1)
                same = np.flatnonzero(rows[place] == fetched.rows_U)
                fetched.values[torch.from_numpy(same)] = values[torch.from_numpy(place[same])]
        if len(fetched.rows_U) > self.capacity:
            self._grow(max(len(fetched.rows_U), 2 * self.capacity))
        self._place(len(self.hot_rows), fetched.values)

    def collect(self, fetched: _Fetched) -> Tensor:
        """The batch's rows after the update, recorded as the newest write."""
        first = len(self.hot_rows)
        values = self.memory.read(slice(first, first + len(fetched.rows_U)))
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


class DiskStore(nn.Module):
    """Tables on disk, looked up, trained, saved and loaded like any others, in one process.

    `tables` are TorchRec configs, all pooled or all looked up row by row; `hot_rows` maps a table to the rows that stay
    in memory (default: none). `prefetch(ids)` starts reading the rows of a coming batch; batches must then be looked up
    in the order in which they were prefetched. One batch is trained at a time: backward before the next lookup.
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
    ) -> None:
        super().__init__()
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError("tables on disk require a single process; with several ranks, shard them over the ranks")
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
        """Start reading the rows of a batch that will be looked up soon."""
        self._ahead.append(self._start_reading(ids))

    def _start_reading(self, ids: KeyedJaggedTensor) -> _Reading:
        reading = _Reading(ids=ids, fetched={}, num_writes={})
        for name, table in self._tables.items():
            reading.num_writes[name] = table.num_writes
            values, _ = pick_lists(ids, table.config.feature_names)
            reading.fetched[name] = self._reader[0].submit(table.fetch, values.numpy(), table.num_writes)
        return reading

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        is_ahead = bool(self._ahead) and self._ahead[0].ids is ids
        reading = self._ahead.popleft() if is_ahead else self._start_reading(ids)
        found: dict[str, Any] = {}
        for name, table in self._tables.items():
            fetched = reading.fetched[name].result()
            table.install(fetched)
            # Writes older than every pending read are on disk for all of them.
            table.forget_writes(min((own.num_writes[name] for own in self._ahead), default=table.num_writes))
            found |= self._look_up(table, fetched, ids)
        return PooledRows(found) if self.is_pooled else found

    def _look_up(self, table: _DiskTable, fetched: _Fetched, ids: KeyedJaggedTensor) -> dict[str, Any]:
        names, width = table.config.feature_names, table.config.embedding_dim
        _, lengths = pick_lists(ids, names)
        offsets = pad(lengths.long().cumsum(0), (1, 0))
        rows = table.memory.look_up(fetched.slots_N, offsets)
        pieces = torch.split(rows, width, dim=1)
        if torch.is_grad_enabled():

            def receive(gradients: Sequence[Tensor]) -> None:
                table.memory.update(fetched.slots_N, offsets, torch.cat(list(gradients), dim=1))
                self._write_back(table, fetched)

            pieces = HandOver.apply(self.anchor, rows, width, receive)  # type: ignore[no-untyped-call]
        return dict(zip(names, pieces, strict=True)) if self.is_pooled else answer_rows(pieces[0], names, lengths)

    def _write_back(self, table: _DiskTable, fetched: _Fetched) -> None:
        values = table.collect(fetched)
        self._writes.append(self._reader[0].submit(table.rows.write, fetched.rows_U, values))
        while len(self._writes) > 2 * len(self._tables):
            self._writes.popleft().result()

    def _in_reader(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work on the files in the one thread that does all of it, in order, and return its result."""
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
        """Set the learning rate of the steps that begin from now on."""
        for table in self._tables.values():
            table.set_lr(lr)

    def start(self, initial_rows: InitialRows) -> None:
        """Set every row to its initial value; tables above EAGER_ROWS rows get hashed rows of the same spread."""
        self.flush()
        self._ahead.clear()
        for name, table in self._tables.items():
            self._in_reader(_start_rows, table.rows, name, initial_rows)
            table.forget_writes(table.num_writes)
            self._in_reader(table.load_hot)

    def state(self) -> dict[str, Any]:
        """All rows as blocks of the files. Writes untouched rows too, so the files grow to their full size."""
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
        """Load rows that were read into the result of `state()`, or into tensors or blocks of the same form."""
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
        return own.memory.split(self._in_reader(own.read_rows, rows_R.numpy()))

    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        self.flush()
        self._ahead.clear()  # rows read ahead may be among these: they are read again
        own = self._tables[table]
        own.forget_writes(own.num_writes)
        self._in_reader(own.write_rows, rows_R.numpy(), own.memory.join(weights_RD, state))


def _start_rows(rows: DiskRows, name: str, initial_rows: InitialRows) -> None:
    rows.clear()
    if rows.num_rows > EAGER_ROWS:
        rows.scale = float(initial_rows(name, 0, 1024).abs().max())
        return
    for begin in range(0, rows.num_rows, BLOCK_ROWS):
        drawn = initial_rows(name, begin, min(begin + BLOCK_ROWS, rows.num_rows))
        rows.write(np.arange(begin, begin + len(drawn)), pad(drawn, (0, rows.width - rows.dim)))
