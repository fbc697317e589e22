"""All-to-all messages inside a node, between nodes and over all ranks, with every byte counted.

The ranks of a job form a grid; a rank communicates along its row, along its column, or with all:

              local rank  0   1   2   3
    node 0                0   1   2   3      node group: a row      fast links
    node 1                4   5   6   7      peer group: a column   slow links
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import distinct_keys, sum_rows

# K = keys, D = columns of a row
LEVELS = ("intra", "inter")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Some of the ranks, in order, including this one."""

    ranks: tuple[int, ...]  # numbers in the whole grid
    position: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of a job by node and local rank, and the bytes this one has sent, by (phase, level)."""

    rank: int
    world_size: int
    ranks_per_node: int
    world: Ring
    node: Ring
    peers: Ring
    device: torch.device = CPU  # of messages: NCCL sends CUDA tensors only
    wire: torch.dtype = torch.float32  # of rows and gradients in messages: float32 or bfloat16
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int,
        device: torch.device = CPU,
        wire: torch.dtype = torch.float32,
    ) -> Grid:
        """The grid of a process group, called on all ranks; a single node if `ranks_per_node` does not divide them."""
        if not dist.is_initialized():
            alone = Ring(ranks=(0,), position=0, group=None)
            return cls(rank=0, world_size=1, ranks_per_node=1, world=alone, node=alone, peers=alone)
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        per_node = ranks_per_node if size % ranks_per_node == 0 else size
        everyone = Ring(ranks=tuple(range(size)), position=rank, group=process_group)
        rows = [tuple(range(first, first + per_node)) for first in range(0, size, per_node)]
        columns = [tuple(range(local, size, per_node)) for local in range(per_node)]
        return cls(
            rank=rank,
            world_size=size,
            ranks_per_node=per_node,
            world=everyone,
            node=_ring(rows, everyone),
            peers=_ring(columns, everyone),
            device=device,
            wire=wire,
        )

    @property
    def own_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that were made for the grid."""
        return [ring.group for ring in (self.node, self.peers) if ring.group not in (None, self.world.group)]

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def node_index(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    def swap(self, ring: Ring, values: Tensor, *, send: Sequence[int], receive: Sequence[int], phase: str) -> Tensor:
        """Send the next `send[i]` entries of `values` to the i-th rank of the ring; returns what they send."""
        if ring.size == 1:
            return values
        received = values.new_empty((sum(receive), *values.shape[1:]))
        dist.all_to_all_single(
            received,
            values.contiguous(),
            output_split_sizes=list(receive),
            input_split_sizes=list(send),
            group=ring.group,
        )
        entry_bytes = values.element_size() * int(np.prod(values.shape[1:]))
        for position, other in enumerate(ring.ranks):
            if other != self.rank:
                level = LEVELS[other // self.ranks_per_node != self.node_index]
                self.sent[phase, level] += send[position] * entry_bytes
        return received

    def swap_vectors(
        self,
        ring: Ring,
        rows_KD: Tensor,
        *,
        send: Sequence[int],
        receive: Sequence[int],
        phase: str,
        is_exact: bool = False,
    ) -> Tensor:
        """`swap` for float32 rows or gradients, rounded to the type of the wire unless `is_exact`."""
        if is_exact or ring.size == 1 or self.wire == torch.float32:
            return self.swap(ring, rows_KD, send=send, receive=receive, phase=phase)
        return _unpacked(self.swap(ring, _packed(rows_KD), send=send, receive=receive, phase=phase))

    def swap_counts(self, ring: Ring, counts: Sequence[int], *, phase: str) -> list[int]:
        """How many entries each rank of the ring will send us, given how many we send to each of them."""
        ones = [1] * ring.size
        values = self.swap(ring, torch.tensor(counts, device=self.device), send=ones, receive=ones, phase=phase)
        return [int(count) for count in values.tolist()]


def _packed(rows_KD: Tensor) -> Tensor:
    """Rows as bfloat16, two of them in a word: gloo has no collectives of bfloat16. Widths are even."""
    return rows_KD.bfloat16().contiguous().view(torch.float32)


def _unpacked(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.bfloat16).float()


def _ring(lines: Sequence[tuple[int, ...]], everyone: Ring) -> Ring:
    """This rank's line with its own process group. All ranks create all groups, as torch requires."""
    if len(lines) == 1:
        return everyone
    mine = next(line for line in lines if everyone.position in line)
    if len(mine) == 1:
        return Ring(ranks=mine, position=0, group=None)
    group = everyone.group or dist.group.WORLD
    assert group is not None  # more than one rank implies a world group
    of_job = [dist.get_global_rank(group, rank) for rank in everyone.ranks]
    groups = [dist.new_group([of_job[rank] for rank in line]) for line in lines]
    return Ring(ranks=mine, position=mine.index(everyone.position), group=groups[lines.index(mine)])


@dataclass(frozen=True, kw_only=True)
class SparseRows:
    """Some rows of a larger array: ascending distinct keys, and one vector per key."""

    keys_K: Tensor
    rows_KD: Tensor

    @classmethod
    def sum_of(cls, lists: Sequence[SparseRows], *, domain: int) -> SparseRows:
        """All rows of the lists; rows with equal keys are summed in the order of the lists."""
        if len(lists) == 1:
            return lists[0]
        keys_K, inverse = distinct_keys(torch.cat([rows.keys_K for rows in lists]), bound=max(domain, 1))
        return cls(keys_K=keys_K, rows_KD=sum_rows(torch.cat([rows.rows_KD for rows in lists]), inverse, len(keys_K)))

    @classmethod
    def merge(cls, lists: Sequence[SparseRows]) -> SparseRows:
        """All rows of lists that share no key."""
        keys_K, order = torch.sort(torch.cat([rows.keys_K for rows in lists]))
        return cls(keys_K=keys_K, rows_KD=torch.cat([rows.rows_KD for rows in lists])[order])

    def between(self, start: int, stop: int) -> SparseRows:
        """The rows with keys in [start, stop), renumbered from 0."""
        first, last = torch.searchsorted(self.keys_K, self.keys_K.new_tensor([start, stop])).tolist()
        return SparseRows(keys_K=self.keys_K[first:last] - start, rows_KD=self.rows_KD[first:last])

    def stripes(self, count: int) -> list[SparseRows]:
        """The rows distributed by key % count; inside a stripe the key is key // count."""
        if count == 1:
            return [self]
        places = [(self.keys_K % count == stripe).nonzero().squeeze(1) for stripe in range(count)]
        return [SparseRows(keys_K=self.keys_K[at] // count, rows_KD=self.rows_KD[at]) for at in places]


def unstripe(stripes: Sequence[SparseRows]) -> SparseRows:
    """The inverse of `SparseRows.stripes`."""
    count = len(stripes)
    if count == 1:
        return stripes[0]
    return SparseRows.merge(
        [SparseRows(keys_K=own.keys_K * count + stripe, rows_KD=own.rows_KD) for stripe, own in enumerate(stripes)]
    )


def swap_rows(
    grid: Grid,
    ring: Ring,
    lists: Sequence[SparseRows],
    *,
    domain: int,
    phase: str,
    receive: Sequence[int] | None = None,
) -> list[SparseRows]:
    """Send the i-th list to the i-th rank of the ring; returns what each sent to us. All keys are below `domain`.

    `receive` is the number of rows from each rank, if already known.
    """
    if ring.size == 1:
        return list(lists)
    is_packed = grid.wire == torch.bfloat16
    dim = lists[0].rows_KD.shape[1] // (2 if is_packed else 1)  # words per row
    rows = [_packed(own.rows_KD) if is_packed else own.rows_KD for own in lists]
    send = [len(own.keys_K) for own in lists]
    receive = grid.swap_counts(ring, send, phase=phase) if receive is None else receive
    named = [_encode(own.keys_K, domain) for own in lists]
    payload = torch.cat([part for own, keys in zip(rows, named, strict=True) for part in (own.reshape(-1), keys)])
    words = [[count * dim + _encoded_words(count, domain) for count in counts] for counts in (send, receive)]
    arrived = grid.swap(ring, payload, send=words[0], receive=words[1], phase=phase)
    found = []
    for count, part in zip(receive, torch.split(arrived, words[1]), strict=True):
        rows_KD = part[: count * dim].view(count, dim)
        keys_K = _decode(part[count * dim :], count, domain)
        found.append(SparseRows(keys_K=keys_K, rows_KD=_unpacked(rows_KD) if is_packed else rows_KD))
    return found


def _is_bitmap(count: int, domain: int) -> bool:
    """Whether one bit per possible key is shorter than one number per present key."""
    return -(-domain // 32) < count * (1 if domain < 1 << 31 else 2)


def _encoded_words(count: int, domain: int) -> int:
    """The number of 4-byte words that encode `count` keys below `domain`; both sides compute it."""
    if not count:
        return 0
    return -(-domain // 32) if _is_bitmap(count, domain) else count * (1 if domain < 1 << 31 else 2)


def _encode(keys_K: Tensor, domain: int) -> Tensor:
    """Ascending keys as words sent along with float32 rows: bits are copied, never interpreted as floats."""
    if not len(keys_K):
        return torch.empty(0, device=keys_K.device)
    if not _is_bitmap(len(keys_K), domain):
        return (keys_K.int() if domain < 1 << 31 else keys_K).view(torch.float32)
    is_present = np.zeros(-(-domain // 32) * 32, dtype=bool)
    is_present[keys_K.cpu().numpy()] = True
    packed = np.packbits(is_present, bitorder="little")
    return torch.from_numpy(packed).view(torch.float32).to(keys_K.device)


def _decode(words: Tensor, count: int, domain: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=torch.int64, device=words.device)
    if not _is_bitmap(count, domain):
        aligned = words.clone()  # int64 needs an address that is a multiple of 8
        return aligned.view(torch.int32 if domain < 1 << 31 else torch.int64).long()
    packed = words.cpu().contiguous().view(torch.uint8).numpy()
    keys = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    return torch.from_numpy(keys).to(words.device)
