"""Rows of the next batches on the ranks that read them: fetched once, kept while needed, written back after.

    batch:            0      1      2      3        a window of four
    rank 0 reads     a b    a c     b      a
    rank 1 reads     a d     d      d     a e
                      |                    |
        row a is read by both: each has a copy and gets the other's gradients after every batch
        rows b, c (rank 0) and d, e (rank 1) are read by one rank: it updates them alone and returns them at the end

The order of samples stays as it is. All ranks know the ids of all ranks in the window, so a batch sends no ids and
waits for no rows: one message with gradients of shared rows replaces four (counts, ids, rows, gradients). Every copy of
a row gets the sum of the same gradients in the same order as on the rank that holds it, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import distinct_keys, sum_rows
from recmill.model.stores.fbgemm import FusedTables
from recmill.model.stores.tiered.layout import KeyLayout

# U = distinct rows of this rank in a batch, S = rows of this rank in the window, K = keys, D = width, C = width + state
SPARE = 8  # a buffer that is too small is replaced by one that is larger than needed by this part: 1/8


@dataclass(frozen=True, kw_only=True)
class WindowBatch:
    """One batch of a window. Lists have one entry per rank."""

    slots_U: Tensor  # where this rank's rows are in its buffer
    send_at: list[Tensor]  # positions among the U whose gradients that rank needs, too
    slots_from: list[Tensor]  # slots whose gradients that rank sends


@dataclass(frozen=True, kw_only=True)
class _OpenWindow:
    keys: list[Tensor]  # per rank, the distinct keys of all ranks' rows that it reads in the window, ascending
    batches: list[WindowBatch]
    send_back: list[Tensor]  # per rank, slots of rows that it holds and that only this rank can return
    take_back: list[Tensor]  # per rank, local keys of the rows that it will return
    own_slots: Tensor  # rows that this rank holds itself
    own_keys: Tensor  # their local keys


class RowWindow:
    """The buffer of one RowExchange. All methods run in its thread, on all ranks together.

    `store` holds the rows of this rank; all of them are global.
    """

    def __init__(self, layout: KeyLayout, store: FusedTables) -> None:
        assert layout.node_start == layout.whole_start == layout.stride, "a window needs tables of global rows only"
        self.layout, self.store, self.grid = layout, store, layout.grid
        self.buffer: FusedTables | None = None
        self._open: _OpenWindow | None = None
        self._is_dirty = False
        self._lr: float | None = None

    @property
    def size_in_bytes(self) -> int:
        return self.buffer.num_bytes if self.buffer else 0

    @torch.no_grad()
    def advance(self, lists: Sequence[Tensor]) -> list[WindowBatch]:
        """Open the window of these batches, given as this rank's distinct keys of each, ascending."""
        self.write_back()
        before = self._open
        listed = self._share(lists)
        window = self._plan(listed)
        self._fetch(window, before)
        self._open = window
        return window.batches

    def discard(self) -> None:
        """Forget the copies: the rows were changed where they are held."""
        self._open, self._is_dirty = None, False

    def look_up(self, batch: WindowBatch) -> Tensor:
        """[U, D]: local."""
        assert self.buffer is not None
        return self.buffer.look_up(batch.slots_U)

    @torch.no_grad()
    def update(self, batch: WindowBatch, gradients_UD: Tensor) -> None:
        """Step every row of the batch that has a copy here, with the gradients of all ranks."""
        assert self.buffer is not None
        grid = self.grid
        gradients_UD = gradients_UD / grid.world_size
        sent = torch.cat([gradients_UD[at] for at in batch.send_at])
        send, receive = ([len(own) for own in each] for each in (batch.send_at, batch.slots_from))
        arrived = grid.swap(grid.world, sent, send=send, receive=receive, phase="gradients")
        parts = list(torch.split(arrived, receive))
        slots = list(batch.slots_from)
        parts[grid.rank], slots[grid.rank] = gradients_UD, batch.slots_U
        slots_K, inverse = distinct_keys(torch.cat(slots), bound=max(len(self._mine), 1))
        if len(slots_K):
            self.buffer.update(slots_K, None, sum_rows(torch.cat(parts), inverse, len(slots_K)))
        self._is_dirty = True

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the rows where they are held up to date. The copies stay valid."""
        if not self._is_dirty:
            return
        window, grid = self._open, self.grid
        assert window is not None
        assert self.buffer is not None
        self.store.write(window.own_keys, *self.buffer.split(self.buffer.read(window.own_slots)))
        columns = self.buffer.read(torch.cat(window.send_back))
        send, receive = ([len(own) for own in each] for each in (window.send_back, window.take_back))
        arrived = grid.swap(grid.world, columns, send=send, receive=receive, phase="write back")
        self.store.write(torch.cat(window.take_back), *self.store.split(arrived))
        self._is_dirty = False

    def set_lr(self, lr: float) -> None:
        self._lr = lr
        if self.buffer is not None:
            self.buffer.set_lr(lr)

    @property
    def _mine(self) -> Tensor:
        assert self._open is not None
        return self._open.keys[self.grid.rank]

    def _share(self, lists: Sequence[Tensor]) -> list[list[Tensor]]:
        """The keys of every batch of every rank: [rank][batch]."""
        grid, count = self.grid, len(lists)
        if grid.world_size == 1:
            return [list(lists)]
        lengths = torch.tensor([len(own) for own in lists] * grid.world_size, device=grid.device)
        each = [count] * grid.world_size
        lengths = grid.swap(grid.world, lengths, send=each, receive=each, phase="ids")
        totals = lengths.view(grid.world_size, count).sum(1).tolist()
        is_short = self.layout.stride * grid.world_size < 1 << 31
        mine = torch.cat(list(lists)).to(torch.int32 if is_short else torch.int64)
        send = [len(mine)] * grid.world_size
        arrived = grid.swap(grid.world, mine.repeat(grid.world_size), send=send, receive=totals, phase="ids").long()
        pieces = torch.split(arrived, lengths.tolist())
        return [list(pieces[rank * count : (rank + 1) * count]) for rank in range(grid.world_size)]

    def _plan(self, listed: list[list[Tensor]]) -> _OpenWindow:
        grid, stride = self.grid, max(self.layout.stride, 1)
        unions = [distinct_keys(torch.cat(own), bound=stride * grid.world_size)[0] for own in listed]
        mine = unions[grid.rank]
        slots = [_places(mine, own) for own in listed[grid.rank]]
        # For each rank: which of this rank's rows it reads, too; and which of its keys this rank has, at which slot.
        is_read_by = [_is_in(mine, own) for own in unions]
        shared = [[_shared(mine, own) for own in each] for each in listed]
        nobody = mine.new_empty(0)
        batches = [
            WindowBatch(
                slots_U=slots_U,
                send_at=[
                    nobody if rank == grid.rank else is_read_by[rank][slots_U].nonzero().squeeze(1)
                    for rank in range(grid.world_size)
                ],
                slots_from=[nobody if rank == grid.rank else shared[rank][place] for rank in range(grid.world_size)],
            )
            for place, slots_U in enumerate(slots)
        ]
        holder_S = mine // stride
        # A row goes back to its holder from the first rank that reads it, unless the holder reads it itself.
        is_first = torch.ones(len(mine), dtype=torch.bool)
        for rank in range(grid.rank):
            is_first &= ~is_read_by[rank]
        is_own = holder_S == grid.rank
        send_back = [
            nobody if rank == grid.rank else (is_first & (holder_S == rank) & ~is_read_by[rank]).nonzero().squeeze(1)
            for rank in range(grid.world_size)
        ]
        return _OpenWindow(
            keys=unions,
            batches=batches,
            send_back=send_back,
            take_back=self._returned(unions),
            own_slots=is_own.nonzero().squeeze(1),
            own_keys=mine[is_own] - grid.rank * stride,
        )

    def _returned(self, unions: list[Tensor]) -> list[Tensor]:
        """Per rank, the local keys of rows held here that it returns: it reads them first, and this rank does not."""
        grid, stride = self.grid, max(self.layout.stride, 1)
        found, known = [], unions[grid.rank]
        for rank, keys in enumerate(unions):
            held = _held(keys, grid.rank, stride)
            new = held[:0] if rank == grid.rank else held[~_is_in(held, known)]
            found.append(new - grid.rank * stride)
            known = torch.sort(torch.cat([known, new])).values
        return found

    def _fetch(self, window: _OpenWindow, before: _OpenWindow | None) -> None:
        """Fill the buffer: rows that this rank had in the last window stay, the others come from their holders."""
        grid, stride = self.grid, max(self.layout.stride, 1)
        mine = window.keys[grid.rank]
        # What each rank lacks; everybody knows what the others have.
        lacking = window.keys
        if before is not None:
            lacking = [now[~_is_in(now, old)] for now, old in zip(window.keys, before.keys, strict=True)]
        wanted = [_held(own, grid.rank, stride) - grid.rank * stride for own in lacking]
        rows = self.store.read(torch.cat(wanted))
        new = lacking[grid.rank]
        edges = torch.searchsorted(new, torch.arange(grid.world_size + 1, device=new.device) * stride)
        receive = edges.diff().tolist()
        arrived = grid.swap(grid.world, rows, send=[len(own) for own in wanted], receive=receive, phase="vectors")
        kept: Any = None
        if before is not None and self.buffer is not None:
            is_kept = _is_in(mine, before.keys[grid.rank])
            kept = is_kept, self.buffer.read(_places(before.keys[grid.rank], mine[is_kept]))
        buffer = self._buffer_of(len(mine))
        buffer.write(_places(mine, new), *buffer.split(arrived))
        if kept is not None:
            buffer.write(kept[0].nonzero().squeeze(1), *buffer.split(kept[1]))

    def _buffer_of(self, num_rows: int) -> FusedTables:
        if self.buffer is None or len(self.buffer.weights[0]) < num_rows:
            size, store = num_rows + num_rows // SPARE, self.store
            self.buffer = FusedTables([size], dim=store.dim, optimiser=store.optimiser, device=store.device)
            if self._lr is not None:
                self.buffer.set_lr(self._lr)
        return self.buffer


def _places(sorted_K: Tensor, keys: Tensor) -> Tensor:
    """Positions of keys that are all there."""
    return torch.searchsorted(sorted_K, keys)


def _is_in(keys: Tensor, sorted_K: Tensor) -> Tensor:
    if not len(sorted_K):
        return torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    return sorted_K[torch.searchsorted(sorted_K, keys).clamp(max=len(sorted_K) - 1)] == keys


def _shared(mine: Tensor, keys: Tensor) -> Tensor:
    """The places in `mine` of the keys that it has."""
    return _places(mine, keys[_is_in(keys, mine)])


def _held(sorted_K: Tensor, rank: int, stride: int) -> Tensor:
    """The keys of rows that a rank holds."""
    first, last = torch.searchsorted(sorted_K, sorted_K.new_tensor([rank * stride, (rank + 1) * stride])).tolist()
    return sorted_K[first:last]
