"""One width's rows over all ranks: distinct keys out, rows back, gradients out, each row updated once.

What a step sends, in this order; n is a rank's distinct ids, D the width:

    phase       ranks   message                                            overlaps with
    ids         all     how many (8 bytes a pair), then 4 bytes an id      what the caller does before it reads a row
    vectors     all     4 D bytes a row                                    the same
    gradients   all     4 D bytes a row                                    dense backward, optimiser, next batch
    reduce      node    how many, then 4 D bytes a replicated row          the same
    exchange    peers   how many, then 4 D bytes a row kept more than once the same
    spread      node    how many, then 4 D bytes a replicated row          the same

Rows of the last three are named by 4 bytes each or by a bitmap, whichever is shorter; ids take 8 bytes where a rank
holds 2**31 rows or more. Node rows travel with the global ones in the first three.

Forward and backward run in a thread of the collection's own, one after the other, so that a lookup always sees the rows
of the update before it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import distinct_keys
from recmill.model.stores.tiered.exchange import Grid, SparseRows, sum_rows
from recmill.model.stores.tiered.rows import Layout, RowStore
from recmill.model.stores.tiered.sync import GradientSync

# N = ids, U = distinct keys of this rank, H = keys others ask of this rank (repeats between ranks), D = width
INT32_KEYS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Request:
    """The distinct keys a rank asks for, by holder, and where each of its ids finds its row among them."""

    keys_U: Tensor  # on the holder
    inverse_N: Tensor
    send: list[int]  # how many keys of each rank


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back, and what a later gradient needs: who asked this rank for what."""

    rows_UD: Tensor
    keys_H: Tensor
    receive: list[int]


@dataclass
class _Unsynced:
    """Gradients of replicated rows that wait for their turn (`sync_every` above 1)."""

    num_steps: int = 0
    lists: list[SparseRows] = field(default_factory=list)


class RowExchange:
    """Lookups and updates of all tables of one width. Called on all ranks together."""

    def __init__(self, layout: Layout, store: RowStore, worker: ThreadPoolExecutor, *, sync_every: int = 1) -> None:
        self.layout, self.store, self.grid = layout, store, layout.grid
        self._worker, self._sync_every = worker, sync_every
        self._sync = GradientSync(
            grid=self.grid,
            num_node=layout.replicated_start - layout.node_start,
            num_replicated=layout.whole_start - layout.replicated_start,
        )
        self._unsynced = _Unsynced()
        self._last: Future[Any] | None = None
        self.key_dtype = torch.int32 if layout.stride < INT32_KEYS else torch.int64  # of an id on the wire

    def request(self, keys_N: Tensor) -> Request:
        """Make keys distinct and sort them by holder."""
        stride, world = max(self.layout.stride, 1), self.grid.world_size
        distinct_U, inverse_N = distinct_keys(keys_N, bound=stride * world)
        edges = torch.searchsorted(distinct_U, torch.arange(1, world, device=distinct_U.device) * stride).tolist()
        ends = [0, *edges, len(distinct_U)]
        send = [stop - start for start, stop in pairwise(ends)]
        return Request(keys_U=distinct_U % stride, inverse_N=inverse_N, send=send)

    def lookup(self, request: Request) -> Future[Answer]:
        """The rows of a request, on their way."""
        return self._submit(self._answer, request, self.store.lookup)

    def read(self, request: Request) -> Tensor:
        """Rows with their optimiser state."""
        answer: Answer = self._submit(self._answer, request, self.store.read).result()
        return answer.rows_UD

    def update(self, request: Request, answer: Answer, gradients_UD: Tensor) -> None:
        """Send gradients, summed over this rank's ids, to the holders, which take one step on every touched row."""
        self._submit(self._update, request, answer, gradients_UD)

    def set_lr(self, lr: float) -> None:
        """The learning rate of updates that are asked for from now on; those on their way keep theirs."""
        self._submit(self.store.set_lr, lr)

    def finish(self) -> None:
        """Wait until every update is in the rows; one that was put off by `sync_every` is made up for."""
        if self._last is not None:
            self._last.result()
        if self._sync_every > 1:
            self._submit(self._flush).result()

    def _submit(self, job: Any, *arguments: Any) -> Future[Any]:
        # An update that failed must not be forgotten because nobody asked for its result.
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = self._worker.submit(job, *arguments)
        return self._last

    def _answer(self, request: Request, read: Any) -> Answer:
        grid, send = self.grid, request.send
        receive = grid.swap_counts(grid.world, send, phase="ids")
        keys_H = grid.swap(
            grid.world, request.keys_U.to(self.key_dtype), send=send, receive=receive, phase="ids"
        ).long()
        rows_HD = read(keys_H)
        rows_UD = grid.swap(grid.world, rows_HD, send=receive, receive=send, phase="vectors")
        return Answer(rows_UD=rows_UD, keys_H=keys_H, receive=receive)

    @torch.no_grad()
    def _update(self, request: Request, answer: Answer, gradients_UD: Tensor) -> None:
        grid, layout = self.grid, self.layout
        gradients_UD = gradients_UD / grid.world_size
        gradients_HD = grid.swap(grid.world, gradients_UD, send=request.send, receive=answer.receive, phase="gradients")
        keys_K, inverse_H = distinct_keys(answer.keys_H, bound=max(layout.stride, 1))
        sums = SparseRows(keys_K=keys_K, rows_KD=sum_rows(gradients_HD, inverse_H, len(keys_K)))
        self._apply(sums.between(0, layout.node_start), 0)
        self._apply(sums.between(layout.whole_start, layout.stride), layout.whole_start)
        node = sums.between(layout.node_start, layout.replicated_start)
        replicated = sums.between(layout.replicated_start, layout.whole_start)
        if self._sync_every == 1:
            self._synchronise(node, replicated)
            return
        self._synchronise(node, SparseRows(keys_K=keys_K[:0], rows_KD=sums.rows_KD[:0]))
        self._unsynced.lists.append(replicated)
        self._unsynced.num_steps += 1
        if self._unsynced.num_steps >= self._sync_every:
            self._flush()

    @torch.no_grad()
    def _flush(self) -> None:
        if not self._unsynced.num_steps:
            return
        replicated = SparseRows.sum_of(self._unsynced.lists, domain=self._sync.num_replicated)
        self._unsynced = _Unsynced()
        none = SparseRows(keys_K=replicated.keys_K[:0], rows_KD=replicated.rows_KD[:0])
        self._synchronise(none, replicated)

    def _synchronise(self, node: SparseRows, replicated: SparseRows) -> None:
        node, replicated = self._sync.run(node, replicated)
        self._apply(node, self.layout.node_start)
        self._apply(replicated, self.layout.replicated_start)

    def _apply(self, gradients: SparseRows, first_key: int) -> None:
        self.store.update(gradients.keys_K + first_key, gradients.rows_KD)


class FetchRows(torch.autograd.Function):
    """The rows of a pending lookup as a differentiable tensor; its gradient goes to the ranks that hold them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, exchange: RowExchange, request: Request, pending: Future[Answer]) -> Tensor:
        ctx.exchange, ctx.request, ctx.answer = exchange, request, pending.result()
        rows_UD: Tensor = ctx.answer.rows_UD
        return rows_UD

    @staticmethod
    def backward(ctx: Any, gradients_UD: Tensor) -> tuple[None, ...]:
        ctx.exchange.update(ctx.request, ctx.answer, gradients_UD.contiguous())
        return None, None, None, None


def grid_summary(grid: Grid) -> dict[str, int]:
    """{"phase/level": bytes this rank has sent}."""
    return {f"{phase}/{level}": count for (phase, level), count in sorted(grid.sent.items())}
