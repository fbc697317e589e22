"""Messages of different sizes between all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

# R = ranks


def world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gather_uneven(
    payload: Tensor, lengths: list[int], group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.Work | None]:
    """([R, longest, ...] with every rank's payload, the work to wait for); all ranks know all `lengths`."""
    longest = max(max(lengths), 1)
    own = payload.flatten(1) if payload.dim() > 1 else payload
    own = pad(own, (0, 0) * (own.dim() - 1) + (0, longest - len(own))).contiguous()
    everyone = own.new_empty(len(lengths) * longest, *own.shape[1:])
    work = dist.all_gather_into_tensor(everyone, own, group=group, async_op=True)
    return everyone.view(len(lengths), longest, *own.shape[1:]), work


def gather_all(payload: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The payloads of all ranks in rank order; they may differ in their first size."""
    own = payload.new_tensor([len(payload)], dtype=torch.int64)
    counts = own.new_empty(world_size(group))
    dist.all_gather_into_tensor(counts, own, group=group)
    lengths = counts.tolist()
    received, work = gather_uneven(payload, lengths, group)
    if work is not None:
        work.wait()
    return [each[:length] for each, length in zip(received, lengths, strict=True)]


def exchange_blocks(blocks: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Start sending this rank's block to all others and receiving theirs in place; returns the work to wait for.

    Gloo's all-gather would pad the blocks to one length and copy them once more on arrival.
    """
    own = dist.get_rank(group)
    others = [rank for rank in range(len(blocks)) if rank != own]
    sends = [dist.P2POp(dist.isend, blocks[own], group=group, group_peer=rank) for rank in others if len(blocks[own])]
    receives = [
        dist.P2POp(dist.irecv, blocks[rank], group=group, group_peer=rank) for rank in others if len(blocks[rank])
    ]
    return dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []
