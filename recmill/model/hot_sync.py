"""How replicated rows stay equal on every rank: gradients of all ranks are gathered and applied by each, in rank order.

    rank 0: ids, gradients --\\                 /--> ranks 0, 1: the same update of the same rows
    rank 1: ids, gradients ---+-- all-gather --+

raw       what travels are the gradients of the lookups. Every rank then makes the update that one table holding all
          samples would make, in the same order: weights and optimiser state are equal to the last bit.
reduced   a rank adds up the gradients of equal rows first, where that is less to send. Sums are taken in another
          order: rows differ from the above by float32 rounding.

The ids are known in the forward pass, so they travel while the model computes; only gradients wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kernels import take_windows
from kernels.expand_rows.ops import sum_rows
from recmill.model.hot_tables import FusedTables

# F = features, B = bags a feature (of one rank), N = ids, U = distinct rows of one rank, D = width, R = ranks
SYNCS = ("raw", "reduced")


def gather_uneven(
    payload: Tensor, lengths: list[int], group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.Work | None]:
    """[R, longest, ...] of every rank's payload, whose lengths all ranks know, and what to wait for."""
    longest = max(max(lengths), 1)
    own = pad(payload.flatten(1), (0, 0, 0, longest - len(payload))) if payload.dim() > 1 else None
    if own is None:
        own = pad(payload, (0, longest - len(payload)))
    own = own.contiguous()
    everyone = own.new_empty(len(lengths) * longest, *own.shape[1:])
    work = dist.all_gather_into_tensor(everyone, own, group=group, async_op=True)
    return everyone.view(len(lengths), longest, *own.shape[1:]), work


class PendingUpdate:
    """One lookup whose gradients all ranks will apply. Made in the forward pass, finished in the backward pass."""

    def __init__(
        self, tables: FusedTables, ids_N: Tensor, lengths_FB: Tensor, *, sync: str, group: dist.ProcessGroup | None
    ) -> None:
        self.tables, self.group = tables, group
        self.ids_N, self.lengths_FB = ids_N, lengths_FB
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.num_bags = len(lengths_FB) // tables.num_features
        if self.world_size == 1:
            return
        self.rows_U: Tensor | None = None
        if sync == "reduced":
            self.rows_U, self.inverse_N = distinct_rows(tables, ids_N, lengths_FB)
        sizes = [self.num_bags, len(ids_N), 0 if self.rows_U is None else len(self.rows_U)]
        self._sizes = torch.empty(3 * self.world_size, dtype=torch.int64)
        own = torch.tensor(sizes, dtype=torch.int64)
        self._sizes_work = dist.all_gather_into_tensor(self._sizes, own, group=group, async_op=True)

    def send_ids(self) -> None:
        """Once sizes are known, start to send what the gradients will belong to."""
        if self.world_size == 1:
            return
        if self._sizes_work is not None:
            self._sizes_work.wait()
        self.sizes_R3 = self._sizes.view(-1, 3).tolist()
        num_vectors = sum(bags * self.tables.num_features for bags, _, _ in self.sizes_R3)
        if self.tables.pooling == "none":
            num_vectors = sum(ids for _, ids, _ in self.sizes_R3)
        # All ranks see the same sizes, so they agree. A row costs what a bag costs, and its id.
        self.is_reduced = self.rows_U is not None and sum(rows for _, _, rows in self.sizes_R3) < num_vectors
        if self.is_reduced and self.rows_U is not None:
            payload = self.rows_U.int()
            lengths = [rows for _, _, rows in self.sizes_R3]
        else:
            payload = torch.cat([self.lengths_FB.int(), self.ids_N.int()])
            lengths = [bags * self.tables.num_features + ids for bags, ids, _ in self.sizes_R3]
        self._ids, self._ids_work = gather_uneven(payload, lengths, self.group)

    def apply(self, gradient: Tensor) -> None:
        """Update the rows with the gradients of all ranks, divided by the number of ranks as TorchRec does."""
        if self.world_size == 1:
            offsets = pad(self.lengths_FB.long().cumsum(0), (1, 0))
            self.tables.update(self.ids_N, offsets, gradient)
            return
        if self._ids_work is not None:
            self._ids_work.wait()
        if self.is_reduced:
            self._apply_reduced(gradient)
        else:
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
        # Ids lie rank by rank, feature by feature inside; the update wants them feature by feature, ranks inside.
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

    def _apply_reduced(self, gradient: Tensor) -> None:
        assert self.rows_U is not None
        rows_UD = self._reduce(gradient).div_(self.world_size)  # after the sum: there are fewer rows than lookups
        lengths = [rows for _, _, rows in self.sizes_R3]
        gathered, work = gather_uneven(rows_UD, lengths, self.group)
        positions = [own[:count].long() for own, count in zip(self._ids, lengths, strict=True)]
        edges_RT = torch.stack([torch.searchsorted(own, self.tables.bases) for own in positions])
        rank_starts = torch.arange(self.world_size, device=gradient.device) * gathered.shape[1]
        starts = (edges_RT[:, :-1] + rank_starts[:, None]).t().reshape(-1)
        windows = edges_RT.diff(dim=1).t().reshape(-1)
        by_table = take_windows(self._ids.view(-1), starts, windows).long()
        if work is not None:
            work.wait()
        self.tables.update_rows(by_table, take_windows(gathered.flatten(0, 1), starts, windows))

    def _reduce(self, gradient: Tensor) -> Tensor:
        """[U, D]: the gradients of this rank's lookups added up by row."""
        assert self.rows_U is not None
        inverse_N = self.inverse_N
        if self.tables.pooling != "none":
            num_features = self.tables.num_features
            bags_BFD = gradient.view(self.num_bags, num_features, self.tables.dim)
            if self.tables.pooling == "mean":
                lengths = self.lengths_FB.view(num_features, self.num_bags).t().clamp(min=1)
                bags_BFD = bags_BFD / lengths[:, :, None]
            if len(self.ids_N) == len(self.lengths_FB) and bool((self.lengths_FB == 1).all()):
                gradient = bags_BFD.reshape(-1, self.tables.dim)
                inverse_N = inverse_N.view(num_features, self.num_bags).t().reshape(-1)
            else:
                bag = torch.arange(len(self.lengths_FB), device=gradient.device)
                bag_BF = (bag % max(self.num_bags, 1)) * num_features + bag // max(self.num_bags, 1)
                bag_of_id = torch.repeat_interleave(bag_BF, self.lengths_FB.long())
                gradient = bags_BFD.reshape(-1, self.tables.dim).index_select(0, bag_of_id)
        return sum_rows(gradient, inverse_N, len(self.rows_U), "cpu" if gradient.device.type == "cpu" else "triton", 0)


def distinct_rows(tables: FusedTables, ids_N: Tensor, lengths_FB: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that were looked up, as sorted positions in all tables, and for every id which of them it is.

    Hot rows are few, so they are marked in an array instead of sorted: 49,152 ids of 48,000 rows take 1.1 ms.
    """
    counts_F = lengths_FB.view(tables.num_features, -1).sum(1)
    positions_N = ids_N + torch.repeat_interleave(tables.base_of_feature, counts_F.long())
    marks = torch.zeros(int(tables.bases[-1]), dtype=torch.bool, device=ids_N.device)
    marks[positions_N] = True
    rows_U = marks.nonzero().squeeze(1)
    place = torch.empty(len(marks), dtype=torch.int64, device=ids_N.device)
    place[rows_U] = torch.arange(len(rows_U), device=ids_N.device)
    return rows_U, place[positions_N]
