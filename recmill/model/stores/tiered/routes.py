"""How requests reach the ranks that hold rows: directly, or merged with those of the node first.

    direct    rank -> holder            one message to every rank; each rank sends its own distinct ids
    merged    rank -> agent -> holder   first inside the node, then between nodes; each node sends its distinct ids

The agent of a row is the rank of the own node in the holder's column of the grid:

              local rank  0   1   2   3
    node 0                a   b   c   d      c reads a row of f: it asks b. b makes the ids of its node distinct, asks f
    node 1                e   f   g   h      once, and distributes the row. Gradients return the same way: b adds up
                                             those of its node and sends f the sum.

Merging takes bytes off the links between nodes (a row that all ranks of a node read crosses once) and sends more inside
the nodes, in twice as many messages. Gradients of a row are added up over the ranks of a node, then over the nodes:
the order of node rows, while the direct way adds up over all ranks. The two differ by the rounding of that sum only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels import distinct_keys, expand_rows, sum_rows
from recmill.model.stores.tiered.exchange import Ring, SparseRows
from recmill.model.stores.tiered.layout import KeyLayout
from recmill.model.stores.tiered.window import WindowBatch

# N = ids, U = distinct keys of this rank, A = keys asked of this rank as an agent, M = distinct ones of these,
# H = keys asked of this rank as a holder (both may repeat between those who ask), D = width
INT32_KEYS = 1 << 31

ReadRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The distinct keys that a rank requests, by receiver, and the position of each id's row among them."""

    keys_U: Tensor  # as the receiver understands them
    inverse_N: Tensor
    send: list[int]  # number of keys per receiver


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What an agent keeps of a request: who asked for which of its node's distinct keys, and who holds them."""

    inverse_A: Tensor
    send: list[int]  # number of distinct keys per node
    receive: list[int]  # number of keys that each node asks for


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The rows received, and what a later gradient needs: who requested which keys of this rank."""

    rows_UD: Tensor
    keys_H: Tensor
    receive: list[int]
    merged: Merged | None = None
    ahead: WindowBatch | None = None  # rows of a window: all of the above but the rows is empty


class Route(ABC):
    """Moves ids, rows and gradients of one KeyLayout. All ranks call `fetch` and `give` together."""

    def __init__(self, layout: KeyLayout, *, num_receivers: int) -> None:
        self.layout, self.grid = layout, layout.grid
        self._stride = max(layout.stride, 1)
        self._num_receivers = num_receivers
        self._span = self._stride * self.grid.world_size // num_receivers  # keys per receiver

    def request(self, keys_N: Tensor) -> Request:
        """Deduplicate keys and sort them by receiver."""
        distinct_U, inverse_N = distinct_keys(self._by_receiver(keys_N), bound=self._stride * self.grid.world_size)
        send = _count(distinct_U, self._span, self._num_receivers)
        return Request(keys_U=distinct_U % self._span, inverse_N=inverse_N, send=send)

    @abstractmethod
    def _by_receiver(self, keys_N: Tensor) -> Tensor:
        """receiver * span + the key as the receiver understands it."""

    @abstractmethod
    def fetch(self, request: Request, read: ReadRows, *, is_exact: bool) -> Answer:
        """The rows of a request; `is_exact`: in float32, whatever lookups use."""

    @abstractmethod
    def give(self, request: Request, answer: Answer, gradients_UD: Tensor) -> SparseRows:
        """Send the gradients of an answer's rows; returns the sums for the rows held here."""

    def _ask(self, ring: Ring, keys: Tensor, send: list[int], *, span: int) -> tuple[Tensor, list[int]]:
        """(keys that the ranks of a ring ask this one for, how many each of them), given what this one asks."""
        receive = self.grid.swap_counts(ring, send, phase="ids")
        dtype = torch.int32 if span < INT32_KEYS else torch.int64
        return self.grid.swap(ring, keys.to(dtype), send=send, receive=receive, phase="ids").long(), receive

    def _sum_held(self, keys_H: Tensor, gradients_HD: Tensor) -> SparseRows:
        keys_K, inverse_H = distinct_keys(keys_H, bound=self._stride)
        return SparseRows(keys_K=keys_K, rows_KD=sum_rows(gradients_HD, inverse_H, len(keys_K)))


class DirectRoute(Route):
    """Every rank asks the holders."""

    def __init__(self, layout: KeyLayout) -> None:
        super().__init__(layout, num_receivers=layout.grid.world_size)

    def _by_receiver(self, keys_N: Tensor) -> Tensor:
        return keys_N

    def fetch(self, request: Request, read: ReadRows, *, is_exact: bool) -> Answer:
        ring, send = self.grid.world, request.send
        keys_H, receive = self._ask(ring, request.keys_U, send, span=self._stride)
        rows_UD = self.grid.swap_vectors(
            ring, read(keys_H), send=receive, receive=send, phase="vectors", is_exact=is_exact
        )
        return Answer(rows_UD=rows_UD, keys_H=keys_H, receive=receive)

    def give(self, request: Request, answer: Answer, gradients_UD: Tensor) -> SparseRows:
        gradients_HD = self.grid.swap_vectors(
            self.grid.world, gradients_UD, send=request.send, receive=answer.receive, phase="gradients"
        )
        return self._sum_held(answer.keys_H, gradients_HD)


class MergedRoute(Route):
    """Every rank asks the agents of its node, and these ask the holders."""

    def __init__(self, layout: KeyLayout) -> None:
        super().__init__(layout, num_receivers=layout.grid.ranks_per_node)

    def _by_receiver(self, keys_N: Tensor) -> Tensor:
        # A column of the grid is a receiver; inside it, keys are in the order of nodes.
        per_node, nodes = self.grid.ranks_per_node, self.grid.nodes
        holder_N = torch.div(keys_N, self._stride, rounding_mode="floor")
        target_N = holder_N % per_node * nodes + torch.div(holder_N, per_node, rounding_mode="floor")
        return keys_N + (target_N - holder_N) * self._stride

    def fetch(self, request: Request, read: ReadRows, *, is_exact: bool) -> Answer:
        grid = self.grid
        keys_A, receive = self._ask(grid.node, request.keys_U, request.send, span=self._span)
        keys_M, inverse_A = distinct_keys(keys_A, bound=self._span)
        asks = _count(keys_M, self._stride, grid.nodes)
        keys_H, asked = self._ask(grid.peers, keys_M % self._stride, asks, span=self._stride)
        rows_MD = grid.swap_vectors(
            grid.peers, read(keys_H), send=asked, receive=asks, phase="vectors", is_exact=is_exact
        )
        rows_AD = expand_rows(rows_MD, inverse_A)
        rows_UD = grid.swap_vectors(
            grid.node, rows_AD, send=receive, receive=request.send, phase="vectors", is_exact=is_exact
        )
        merged = Merged(inverse_A=inverse_A, send=asks, receive=asked)
        return Answer(rows_UD=rows_UD, keys_H=keys_H, receive=receive, merged=merged)

    def give(self, request: Request, answer: Answer, gradients_UD: Tensor) -> SparseRows:
        grid, merged = self.grid, answer.merged
        assert merged is not None
        gradients_AD = grid.swap_vectors(
            grid.node, gradients_UD, send=request.send, receive=answer.receive, phase="gradients"
        )
        sums_MD = sum_rows(gradients_AD, merged.inverse_A, sum(merged.send))
        gradients_HD = grid.swap_vectors(
            grid.peers, sums_MD, send=merged.send, receive=merged.receive, phase="gradients"
        )
        return self._sum_held(answer.keys_H, gradients_HD)


def route_of(layout: KeyLayout, *, merges_nodes: bool) -> Route:
    """Merging needs several nodes of several ranks; elsewhere requests go directly."""
    if merges_nodes and layout.grid.nodes > 1 and layout.grid.ranks_per_node > 1:
        return MergedRoute(layout)
    return DirectRoute(layout)


def _count(sorted_keys: Tensor, span: int, count: int) -> list[int]:
    """How many of the keys are in each of the first `count` ranges of `span`."""
    edges = torch.searchsorted(sorted_keys, torch.arange(1, count, device=sorted_keys.device) * span).tolist()
    return [stop - start for start, stop in pairwise([0, *edges, len(sorted_keys)])]
