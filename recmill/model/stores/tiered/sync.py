"""Gradients of rows with several copies: summed over all ranks, so that every copy gets the same update.

    reduce     inside a node, each rank sends its gradients of a replicated row to the local rank with the row's stripe
    exchange   between nodes, ranks of the same stripe send each other the sums of their nodes
    spread     inside a node, each stripe's totals of replicated rows go to all ranks

Only touched rows are sent. Sums are taken in rank order, then in node order, on every node: copies stay equal bit for
bit. Node rows arrive here already reduced; they need only the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recmill.model.stores.tiered.exchange import Grid, SparseRows, swap_rows, unstripe


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """Sums gradients over all copies of `num_node` node rows (this rank's stripe) and `num_replicated` rows."""

    grid: Grid
    num_node: int
    num_replicated: int

    def run(self, node: SparseRows, replicated: SparseRows) -> tuple[SparseRows, SparseRows]:
        """The totals over all ranks for both tiers, from this node's sums and this rank's gradients."""
        grid, stripes = self.grid, self.grid.ranks_per_node
        stripe_size = -(-self.num_replicated // stripes)
        own = replicated
        if self.num_replicated:
            lists = swap_rows(grid, grid.node, replicated.stripes(stripes), domain=stripe_size, phase="reduce")
            own = SparseRows.sum_of(lists, domain=stripe_size)
        if grid.nodes > 1 and self.num_node + self.num_replicated:
            both = SparseRows(
                keys_K=torch.cat([node.keys_K, own.keys_K + self.num_node]),
                rows_KD=torch.cat([node.rows_KD, own.rows_KD]),
            )
            total = self._exchange(both, self.num_node + stripe_size)
            node = total.between(0, self.num_node)
            own = total.between(self.num_node, self.num_node + stripe_size)
        if self.num_replicated:
            lists = swap_rows(grid, grid.node, [own] * stripes, domain=stripe_size, phase="spread")
            own = unstripe(lists)
        return node, own

    def _exchange(self, sums: SparseRows, domain: int) -> SparseRows:
        """The total over all nodes: all send everything to all, or, where that is more, each sums a share."""
        grid, nodes = self.grid, self.grid.nodes
        counts = grid.swap_counts(grid.peers, [len(sums.keys_K)] * nodes, phase="exchange")
        touched = sum(counts)
        gather = touched * (nodes - 1)
        scatter = touched * (nodes - 1) // nodes + min(touched, domain) * (nodes - 1)
        if gather <= scatter:
            lists = swap_rows(grid, grid.peers, [sums] * nodes, domain=domain, phase="exchange", receive=counts)
            return SparseRows.sum_of(lists, domain=domain)
        share = -(-domain // nodes)
        lists = swap_rows(grid, grid.peers, sums.stripes(nodes), domain=share, phase="exchange")
        total = SparseRows.sum_of(lists, domain=share)
        return unstripe(swap_rows(grid, grid.peers, [total] * nodes, domain=share, phase="exchange"))
