"""How replicated rows stay equal: every rank gathers the gradients of all ranks and applies them in rank order.

    rank 0: ids, gradients --\\                 /--> ranks 0, 1: the same update of the same rows
    rank 1: ids, gradients ---+-- all-gather --+

raw       ranks send the gradients of their lookups. Every rank then makes the update that one table with all samples
          would make, in the same order: weights and optimiser state are equal to the last bit.
reduced   a rank first sums the gradients of equal rows, where that is less to send. The order of the sums differs, so
          rows differ from "raw" by float32 rounding.

No rank waits for another where it can compute instead. Ids are known in the forward pass and travel during the step;
reduced gradients travel while the backward pass and the dense optimiser go on, and `finish` applies them before the
rows are read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kernels import find_rows, sum_bags, take_windows
from recmill.model.stores.collectives import exchange_blocks, gather_uneven, world_size
from recmill.model.stores.fbgemm import FusedTables

# F = features, B = bags per feature (of one rank), N = ids, U = distinct rows of one rank, D = width, R = ranks
SYNCS = ("raw", "reduced")


class PendingUpdate:
    """One lookup whose gradients all ranks will apply. Created in the forward pass, finished in the backward pass."""

    def __init__(
        self,
        tables: FusedTables,
        ids_N: Tensor,
        lengths_FB: Tensor,
        offsets: Tensor,
        *,
        sync: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.tables, self.group = tables, group
        self.ids_N, self.lengths_FB, self.offsets = ids_N, lengths_FB, offsets
        self.world_size = world_size(group)
        self.num_bags = len(lengths_FB) // tables.num_features
        self._is_sent = self.world_size == 1
        self._blocks: Sequence[Tensor] = ()  # reduced gradients of all ranks, on their way until `finish`
        self._works: list[dist.Work] = []
        if self._is_sent:
            return
        self.rows_U: Tensor | None = None
        if sync == "reduced":
            edges_F = offsets[:: self.num_bags] if self.num_bags else offsets.new_zeros(tables.num_features + 1)
            self.rows_U, self.inverse_N = find_rows(
                ids_N, edges_F.contiguous(), tables.base_of_feature, num_rows=tables.num_rows
            )
        sizes = [self.num_bags, len(ids_N), 0 if self.rows_U is None else len(self.rows_U)]
        self._sizes = torch.empty(3 * self.world_size, dtype=torch.int64)
        own = torch.tensor(sizes, dtype=torch.int64)
        self._sizes_work = dist.all_gather_into_tensor(self._sizes, own, group=group, async_op=True)

    def send_ids(self) -> None:
        """Once sizes are known, start sending the ids that the gradients will belong to; repeated calls do nothing."""
        if self._is_sent:
            return
        self._is_sent = True
        if self._sizes_work is not None:
            self._sizes_work.wait()
        self.sizes_R3 = self._sizes.view(-1, 3).tolist()
        num_vectors = sum(bags * self.tables.num_features for bags, _, _ in self.sizes_R3)
        if self.tables.pooling == "none":
            num_vectors = sum(ids for _, ids, _ in self.sizes_R3)
        # All ranks see the same sizes, so they agree. A row costs as much as a bag, plus its id.
        self.is_reduced = self.rows_U is not None and sum(rows for _, _, rows in self.sizes_R3) < num_vectors
        if self.is_reduced and self.rows_U is not None:
            counts = [rows for _, _, rows in self.sizes_R3]
            self._rows = torch.split(self.rows_U.new_empty(sum(counts)), counts)
            self._rows[dist.get_rank(self.group)].copy_(self.rows_U)
            self._works = exchange_blocks(self._rows, self.group)
            return
        payload = torch.cat([self.lengths_FB.int(), self.ids_N.int()])
        lengths = [bags * self.tables.num_features + ids for bags, ids, _ in self.sizes_R3]
        self._ids, self._ids_work = gather_uneven(payload, lengths, self.group)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Update the rows with the gradients of all ranks, divided by the number of ranks as TorchRec does.

        `gradients` is one [B, D] per feature for pooled tables, or a single [N, D]. Reduced gradients are only sent
        here: `finish` applies them.
        """
        self.send_ids()
        if self.world_size > 1 and self.is_reduced:
            self._send_reduced(gradients)
            return
        gradient = torch.cat(list(gradients), dim=1) if len(gradients) > 1 else gradients[0]
        if self.world_size == 1:
            self.tables.update(self.ids_N, self.offsets, gradient)
            return
        if self._ids_work is not None:
            self._ids_work.wait()
        self._apply_raw(gradient / self.world_size)

    def _apply_raw(self, gradient: Tensor) -> None:
        num_features, is_pooled = self.tables.num_features, self.tables.pooling != "none"
        lengths = [bags if is_pooled else ids for bags, ids, _ in self.sizes_R3]
        gathered, work = gather_uneven(gradient, lengths, self.group)
        per_rank = [
            received[: bags * num_features].view(num_features, bags)
            for received, (bags, _, _) in zip(self._ids, self.sizes_R3, strict=True)
        ]
        lengths_FB = torch.cat(per_rank, dim=1).long()
        counts_RF = torch.stack([own.sum(1) for own in per_rank]).long()
        # Ids are ordered by rank, then feature; the update needs them ordered by feature, then rank.
        heads_R = torch.tensor([bags * num_features for bags, _, _ in self.sizes_R3], device=gradient.device)
        firsts_RF = counts_RF.cumsum(1) - counts_RF
        rank_starts = torch.arange(self.world_size, device=gradient.device) * self._ids.shape[1]
        starts = (firsts_RF + (heads_R + rank_starts)[:, None]).t().reshape(-1)
        windows = counts_RF.t().reshape(-1)
        ids_N = take_windows(self._ids.view(-1), starts, windows).long()
        offsets = pad(lengths_FB.view(-1).cumsum(0), (1, 0))
        if work is not None:
            work.wait()
        if is_pooled:
            everyone = torch.cat([own[:bags] for own, bags in zip(gathered, lengths, strict=True)])
        else:
            starts = firsts_RF + torch.arange(self.world_size, device=gradient.device)[:, None] * gathered.shape[1]
            everyone = take_windows(gathered.flatten(0, 1), starts.t().reshape(-1), windows)
        self.tables.update(ids_N, offsets, everyone)

    def _send_reduced(self, gradients: Sequence[Tensor]) -> None:
        is_pooled = self.tables.pooling != "none"
        counts = [rows for _, _, rows in self.sizes_R3]
        self._blocks = torch.split(self.tables.buffer(sum(counts)), counts)
        sum_bags(
            gradients,
            self.offsets if is_pooled else None,
            self.inverse_N,
            out=self._blocks[dist.get_rank(self.group)],
            is_mean=self.tables.pooling == "mean",
        )
        self._works += exchange_blocks(self._blocks, self.group)

    def finish(self) -> None:
        """Wait for reduced gradients that are on their way, and apply them."""
        for work in self._works:
            work.wait()
        if self._blocks:
            self.tables.update_rows(list(zip(self._rows, self._blocks, strict=True)), scale=1 / self.world_size)
        self._works, self._blocks = [], ()
