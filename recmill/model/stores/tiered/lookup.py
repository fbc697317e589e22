"""Rows of one width over all ranks: distinct keys out, rows back, gradients out, each row updated once.

What a step sends, in this order (D is the width):

    phase       ranks   message                                               overlaps with
    ids         all     counts (8 bytes per pair of ranks), 4 bytes per id    work of the caller before it reads a row
    vectors     all     4 D bytes per row                                     the same
    gradients   all     4 D bytes per row                                     dense backward, optimiser, next batch
    reduce      node    counts, 4 D bytes per replicated row                  the same
    exchange    peers   counts, 4 D bytes per row with several copies         the same
    spread      node    counts, 4 D bytes per replicated row                  the same

The last three name rows by 4 bytes each or by a bitmap, whichever is shorter; ids take 8 bytes where a rank holds 2**31
rows or more. Node rows are sent with the global ones in the first three. With `merges_nodes` the first three are sent
inside the node first and then between nodes, with the ids and gradients of a node merged (routes.py). With bfloat16 on
the wire a row takes 2 D bytes.

With lookahead (window.py), the rows of several batches are fetched together and only gradients are sent per batch.

Forward and backward run in one thread of the collection, one after the other, so that a lookup always sees the rows of
the previous update.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recmill.model.stores.fbgemm import FusedTables
from recmill.model.stores.tiered.exchange import SparseRows
from recmill.model.stores.tiered.layout import KeyLayout
from recmill.model.stores.tiered.routes import Answer, Request, route_of
from recmill.model.stores.tiered.sync import GradientSync
from recmill.model.stores.tiered.window import RowWindow, WindowBatch

# N = ids, U = distinct keys of this rank, D = width


@dataclass
class _Unsynced:
    """Gradients of replicated rows that wait for the next synchronisation (`sync_every` above 1)."""

    num_steps: int = 0
    lists: list[SparseRows] = field(default_factory=list)


class RowExchange:
    """Lookups and updates of all tables of one width. All ranks call it together."""

    def __init__(
        self,
        layout: KeyLayout,
        store: FusedTables,
        worker: ThreadPoolExecutor,
        *,
        sync_every: int = 1,
        is_lookahead: bool = False,
        merges_nodes: bool = False,
    ) -> None:
        self.layout, self.store, self.grid = layout, store, layout.grid
        self._worker, self._sync_every = worker, sync_every
        self._sync = GradientSync(
            grid=self.grid,
            num_node=layout.replicated_start - layout.node_start,
            num_replicated=layout.whole_start - layout.replicated_start,
        )
        self._unsynced = _Unsynced()
        self.window = RowWindow(layout, store) if is_lookahead else None
        # A window sends by holder.
        self._route = route_of(layout, merges_nodes=merges_nodes and not is_lookahead)
        self._last: Future[Any] | None = None

    def request(self, keys_N: Tensor) -> Request:
        """The distinct keys in the order in which they are sent."""
        return self._route.request(keys_N)

    def lookup(self, request: Request) -> Future[Answer]:
        """Start fetching the rows of a request."""
        if self.window is not None:
            self._submit(self.window.write_back)
        return self._submit(lambda: self._route.fetch(request, self.store.look_up, is_exact=False))

    def open_window(self, requests: Sequence[Request]) -> Future[list[WindowBatch]]:
        """Start fetching the rows of the next batches, which are then looked up in this order."""
        assert self.window is not None
        return self._submit(self.window.advance, [self._keys_anywhere(request) for request in requests])

    def lookup_ahead(self, opened: Future[list[WindowBatch]], place: int) -> Future[Answer]:
        """Start reading the rows of a batch of the open window."""
        return self._submit(self._answer_ahead, opened, place)

    def _keys_anywhere(self, request: Request) -> Tensor:
        holders = torch.repeat_interleave(torch.tensor(request.send, device=request.keys_U.device))
        return holders * self.layout.stride + request.keys_U

    def _answer_ahead(self, opened: Future[list[WindowBatch]], place: int) -> Answer:
        assert self.window is not None
        batch = opened.result()[place]
        rows_UD = self.window.look_up(batch)
        return Answer(rows_UD=rows_UD, keys_H=batch.slots_U[:0], receive=[], ahead=batch)

    def read(self, request: Request) -> Tensor:
        """Rows with their optimiser state."""
        answer: Answer = self._submit(lambda: self._route.fetch(request, self.store.read, is_exact=True)).result()
        return answer.rows_UD

    def update(self, request: Request, answer: Answer, gradients_UD: Tensor) -> None:
        """Send gradients, summed over this rank's ids, to the holders, which step every touched row once."""
        self._submit(self._update, request, answer, gradients_UD)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of updates submitted from now on; pending updates keep theirs."""
        self._submit(self.store.set_lr, lr)
        if self.window is not None:
            self._submit(self.window.set_lr, lr)

    def finish(self) -> None:
        """Wait until every update is applied, including those deferred by `sync_every`."""
        if self._last is not None:
            self._last.result()
        if self._sync_every > 1:
            self._submit(self._flush).result()
        if self.window is not None:
            self._submit(self.window.write_back).result()

    def discard_window(self) -> None:
        """After `finish`: rows are about to change where they are held."""
        if self.window is not None:
            self.window.discard()

    def _submit(self, job: Any, *arguments: Any) -> Future[Any]:
        # Nobody waits for an update: raise its error here if it failed.
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = self._worker.submit(job, *arguments)
        return self._last

    @torch.no_grad()
    def _update(self, request: Request, answer: Answer, gradients_UD: Tensor) -> None:
        grid, layout = self.grid, self.layout
        if answer.ahead is not None and self.window is not None:
            self.window.update(answer.ahead, gradients_UD)
            return
        sums = self._route.give(request, answer, gradients_UD / grid.world_size)
        self._apply(sums.between(0, layout.node_start), 0)
        self._apply(sums.between(layout.whole_start, layout.stride), layout.whole_start)
        node = sums.between(layout.node_start, layout.replicated_start)
        replicated = sums.between(layout.replicated_start, layout.whole_start)
        if self._sync_every == 1:
            self._synchronise(node, replicated)
            return
        self._synchronise(node, SparseRows(keys_K=sums.keys_K[:0], rows_KD=sums.rows_KD[:0]))
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
        if len(gradients.keys_K):
            self.store.update(gradients.keys_K + first_key, None, gradients.rows_KD)
