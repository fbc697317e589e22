"""How replicated rows stay equal: every rank gathers the gradients of all ranks and applies them in rank order.

    rank 0: ids, gradients --\\                 /--> ranks 0, 1: the same update of the same rows
    rank 1: ids, gradients ---+-- all-gather --+

raw       ranks send the gradients of their lookups. Every rank then makes the update that one table with all samples
          would make, in the same order: weights and optimiser state are equal to the last bit.
reduced   a rank first sums the gradients of equal rows, where that is less to send. The order of the sums differs, so
          rows differ from "raw" by float32 rounding.

A step has three messages per pair of ranks, for all tables together: on loopback, a message costs as much as 100 KB.

    forward pass    sizes, when all tables were looked up    ids, at its end, when the sizes of all ranks are there
    backward pass   gradients, when those of all tables are known

No rank waits for another where it can compute instead: gradients travel while the backward pass and the dense optimiser
go on, and `settle` applies them before the rows are read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kernels import find_rows, sum_bags, take_windows
from recmill.model.stores.collectives import exchange_blocks, world_size
from recmill.model.stores.fbgemm import FusedTables

# F = features, B = bags per feature (of one rank), N = ids, U = distinct rows of one rank, D = width, R = ranks
SYNCS = ("raw", "reduced")
NUM_SIZES = 3  # of a lookup: bags per feature, ids, distinct rows


class HotExchange:
    """The messages of collections that are looked up together. All ranks look up and go back in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.world_size = group, world_size(group)
        self._open: _Round | None = None  # its sizes are not sent yet
        self._sent: _Round | None = None  # its gradients may be on their way
        self._buffer = torch.empty(0)

    def join(self, update: PendingUpdate) -> _Round:
        """The round of messages that a lookup belongs to."""
        if self._open is None or any(own.tables is update.tables for own in self._open.updates):
            self.send_sizes()
            self._open = _Round(self)
        self._open.updates.append(update)
        return self._open

    def send_sizes(self) -> None:
        """Start to tell the other ranks how much the lookups so far will send."""
        if self._open is not None:
            self._open.send_sizes()
            self._open = None

    def settle(self) -> None:
        """Apply gradients that are still on their way."""
        if self._sent is not None:
            self._sent.finish()
            self._sent = None

    def begin_gradients(self, own: _Round) -> None:
        """Those of an earlier round are applied first: they use the same buffer."""
        self.settle()
        self._sent = own

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """[size] floats, valid until the next call: fresh pages in every step would cost milliseconds."""
        if len(self._buffer) < size:
            self._buffer = torch.empty(size + size // 8, device=device)
        return self._buffer[:size]


class _Round:
    """The messages about one lookup of every collection."""

    def __init__(self, exchange: HotExchange) -> None:
        self.exchange, self.group = exchange, exchange.group
        self.updates: list[PendingUpdate] = []
        self.rank = dist.get_rank(exchange.group) if exchange.world_size > 1 else 0
        self._works: list[dist.Work] = []  # messages on their way
        self._sizes: Tensor | None = None
        self._has_ids = False
        self._own: list[Tensor] = []  # where this rank's gradients go
        self._left: set[int] = set()  # updates whose gradients are not known yet
        self._blocks: Sequence[Tensor] = ()  # gradients of all ranks

    def send_sizes(self) -> None:
        sizes = [size for update in self.updates for size in update.sizes]
        self._sizes = torch.empty(self.exchange.world_size, len(sizes), dtype=torch.int64)
        self._sizes[self.rank] = torch.tensor(sizes)
        self._works = exchange_blocks(self._sizes.unbind(), self.group)

    def send_ids(self) -> None:
        """Start to send the ids that the gradients will belong to; repeated calls do nothing."""
        if self._has_ids:
            return
        self._has_ids = True
        if self._sizes is None:
            self.exchange.send_sizes()
        assert self._sizes is not None
        self._wait()
        for update, own in zip(self.updates, torch.split(self._sizes, NUM_SIZES, dim=1), strict=True):
            update.take_sizes(own.tolist())
        counts_R = [sum(update.num_ids(rank) for update in self.updates) for rank in range(len(self._sizes))]
        device = self.updates[0].ids_N.device
        blocks = torch.split(torch.empty(sum(counts_R), dtype=torch.int32, device=device), counts_R)
        torch.cat([own for update in self.updates for own in update.ids_to_send()], out=blocks[self.rank])
        for rank, block in enumerate(blocks):
            pieces = torch.split(block, [update.num_ids(rank) for update in self.updates])
            for update, piece in zip(self.updates, pieces, strict=True):
                update.received.append(piece)
        self._works = exchange_blocks(blocks, self.group)

    def give(self, update: PendingUpdate, gradients: Sequence[Tensor]) -> None:
        """Take the gradients of one lookup, and start to send all of them with the last one."""
        self.send_ids()
        if not self._blocks:
            self.exchange.begin_gradients(self)
            counts_R = [sum(own.num_floats(rank) for own in self.updates) for rank in range(self.exchange.world_size)]
            self._blocks = torch.split(self.exchange.buffer(sum(counts_R), gradients[0].device), counts_R)
            self._own = self._pieces(self.rank)
            self._left = set(range(len(self.updates)))
        place = self.updates.index(update)
        update.fill(gradients, out=self._own[place])
        self._left.discard(place)
        if not self._left:
            self._works += exchange_blocks(self._blocks, self.group)

    def _pieces(self, rank: int) -> list[Tensor]:
        return list(torch.split(self._blocks[rank], [own.num_floats(rank) for own in self.updates]))

    def finish(self) -> None:
        """Wait for the gradients of all ranks, and apply them. Lookups that the loss does not depend on have none."""
        if self._left:
            for place in self._left:
                self._own[place].zero_()
            self._works += exchange_blocks(self._blocks, self.group)
        self._wait()
        pieces_R = [self._pieces(rank) for rank in range(self.exchange.world_size)]
        for update, *blocks in zip(self.updates, *pieces_R, strict=True):
            update.apply(blocks)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class PendingUpdate:
    """One lookup of tables of one width, whose gradients all ranks will apply."""

    def __init__(
        self,
        tables: FusedTables,
        ids_N: Tensor,
        lengths_FB: Tensor,
        offsets: Tensor,
        *,
        sync: str,
        exchange: HotExchange,
    ) -> None:
        self.tables, self.world_size = tables, exchange.world_size
        self.ids_N, self.lengths_FB, self.offsets = ids_N, lengths_FB, offsets
        self.is_pooled = tables.pooling != "none"
        self.num_bags = len(lengths_FB) // tables.num_features
        self.rows_U: Tensor | None = None
        self.received: list[Tensor] = []  # the ids of every rank
        if self.world_size == 1:
            return
        if sync == "reduced":
            edges_F = offsets[:: self.num_bags] if self.num_bags else offsets.new_zeros(tables.num_features + 1)
            self.rows_U, self.inverse_N = find_rows(
                ids_N, edges_F.contiguous(), tables.base_of_feature, num_rows=tables.num_rows
            )
        self._round = exchange.join(self)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.num_bags, len(self.ids_N), 0 if self.rows_U is None else len(self.rows_U)

    def send_ids(self) -> None:
        """Send the ids of all lookups of this round."""
        if self.world_size > 1:
            self._round.send_ids()

    def receive(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients of the lookup: one [B, D] per feature for pooled tables, or a single [N, D].

        They are divided by the number of ranks, as TorchRec does.
        """
        if self.world_size > 1:
            self._round.give(self, gradients)
            return
        self.tables.update(self.ids_N, self.offsets, self._joined(gradients))

    def take_sizes(self, sizes_R3: list[list[int]]) -> None:
        self.sizes_R3 = sizes_R3
        num_vectors = sum(self._num_vectors(rank) for rank in range(len(sizes_R3)))
        # All ranks see the same sizes, so they agree. A row costs as much as a bag, plus its id.
        self.is_reduced = self.rows_U is not None and sum(rows for _, _, rows in sizes_R3) < num_vectors

    def _num_vectors(self, rank: int) -> int:
        num_bags, num_ids, _ = self.sizes_R3[rank]
        return num_bags * self.tables.num_features if self.is_pooled else num_ids

    def num_ids(self, rank: int) -> int:
        """Numbers that a rank sends about its ids: its rows, or the lengths of its bags and its ids."""
        num_bags, num_ids, num_rows = self.sizes_R3[rank]
        return num_rows if self.is_reduced else num_bags * self.tables.num_features + num_ids

    def ids_to_send(self) -> list[Tensor]:
        if self.is_reduced:
            assert self.rows_U is not None
            return [self.rows_U]
        return [self.lengths_FB.int(), self.ids_N.int()]

    def num_floats(self, rank: int) -> int:
        """Numbers that a rank sends as gradients."""
        return self.tables.dim * (self.sizes_R3[rank][2] if self.is_reduced else self._num_vectors(rank))

    def fill(self, gradients: Sequence[Tensor], *, out: Tensor) -> None:
        """Write the gradients that this rank sends to `out`."""
        if not self.is_reduced:
            out.copy_(self._joined(gradients).flatten()).div_(self.world_size)
            return
        offsets = self.offsets if self.is_pooled else None
        out_UD = out.view(-1, self.tables.dim)
        sum_bags(gradients, offsets, self.inverse_N, out=out_UD, is_mean=self.tables.pooling == "mean")

    def _joined(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(gradients), dim=1) if len(gradients) > 1 else gradients[0]

    def apply(self, blocks: Sequence[Tensor]) -> None:
        """Update the rows with the gradients of all ranks."""
        if self.is_reduced:
            gradients = [own.view(-1, self.tables.dim) for own in blocks]
            self.tables.update_rows(list(zip(self.received, gradients, strict=True)), scale=1 / self.world_size)
        else:
            self._apply_raw(blocks)

    def _apply_raw(self, blocks: Sequence[Tensor]) -> None:
        num_features, device = self.tables.num_features, self.ids_N.device
        per_rank = [
            received[: bags * num_features].view(num_features, bags)
            for received, (bags, _, _) in zip(self.received, self.sizes_R3, strict=True)
        ]
        lengths_FB = torch.cat(per_rank, dim=1).long()
        counts_RF = torch.stack([own.sum(1) for own in per_rank]).long()
        # Ids are ordered by rank, then feature; the update needs them ordered by feature, then rank.
        heads_R = torch.tensor([bags * num_features for bags, _, _ in self.sizes_R3], device=device)
        ends_R = torch.tensor([len(own) for own in self.received], device=device).cumsum(0)
        firsts_RF = counts_RF.cumsum(1) - counts_RF
        starts = firsts_RF + (heads_R + pad(ends_R[:-1], (1, 0)))[:, None]
        windows = counts_RF.t().reshape(-1)
        ids_N = take_windows(torch.cat(self.received), starts.t().reshape(-1), windows).long()
        offsets = pad(lengths_FB.view(-1).cumsum(0), (1, 0))
        if self.is_pooled:
            everyone = torch.cat([own.view(-1, num_features * self.tables.dim) for own in blocks])
        else:
            ends_R = torch.tensor([ids for _, ids, _ in self.sizes_R3], device=device).cumsum(0)
            starts = firsts_RF + pad(ends_R[:-1], (1, 0))[:, None]
            joined_ND = torch.cat([own.view(-1, self.tables.dim) for own in blocks])
            everyone = take_windows(joined_ND, starts.t().reshape(-1), windows)
        self.tables.update(ids_N, offsets, everyone)
