"""Messages of different sizes between all ranks. Small values travel as JSON: torch's object collectives unpickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON value on every rank of the default process group; the other ranks' values are ignored."""
    return _from_bytes(broadcast_values(_as_bytes(value if dist.get_rank() == 0 else None)))


def broadcast_values(values_N: Tensor) -> Tensor:
    """Rank 0's vector on every rank of the default process group; the other ranks' give its dtype only."""
    sent_N = values_N.to(message_device())
    length = torch.tensor([len(sent_N)], device=sent_N.device)
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        sent_N = sent_N.new_empty(int(length))
    dist.broadcast(sent_N, src=0)
    return sent_N.to(values_N.device)


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The JSON values of all ranks of the default or a gloo process group, in rank order, on every rank."""
    sent = _as_bytes(value)
    return [_from_bytes(text) for text in gather_all(sent if group is None else sent.cpu(), group)]


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(message_device())


def _from_bytes(text: Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()))


def message_device() -> torch.device:
    """Where the default process group's messages must be: NCCL sends from GPUs only."""
    return torch.device("cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu")


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
