"""What the collections share: the lists of a batch going in, answers in TorchRec's form, gradients going back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, PoolingType

# F = features, B = lists per feature, N = ids, D = embedding width
TableConfig = Any  # EmbeddingBagConfig | EmbeddingConfig; TorchRec is untyped, so a union would say no more


def pooling_of(config: TableConfig) -> str:
    """sum, mean or none."""
    if (pooling := getattr(config, "pooling", None)) is None:
        return "none"
    return "mean" if pooling == PoolingType.MEAN else "sum"


def pick_lists(ids: KeyedJaggedTensor, wanted: list[str]) -> tuple[Tensor, Tensor]:
    """(values [N], lengths [F * B]) of some features, in the order wanted; no copy where the batch has just these."""
    keys = ids.keys()
    if keys == wanted:
        return ids.values(), ids.lengths()
    edges, stride = ids.offset_per_key(), ids.stride()
    positions = [keys.index(name) for name in wanted]
    values = torch.cat([ids.values()[edges[p] : edges[p + 1]] for p in positions])
    return values, torch.cat([ids.lengths()[p * stride : (p + 1) * stride] for p in positions])


def answer_rows(rows_ND: Tensor, features: Sequence[str], lengths_FB: Tensor) -> dict[str, JaggedTensor]:
    """Rows of all features one after another, as one JaggedTensor per feature."""
    lengths = lengths_FB.view(len(features), -1)
    pieces = zip(features, torch.split(rows_ND, lengths.sum(1).tolist()), lengths, strict=True)
    return {name: JaggedTensor(values=values, lengths=own) for name, values, own in pieces}


class PooledRows:
    """What pooled tables return for a batch."""

    def __init__(self, vectors: dict[str, Tensor]) -> None:
        self._vectors = vectors

    def to_dict(self) -> dict[str, Tensor]:
        """Feature -> [B, D]."""
        return self._vectors


class HandOver(torch.autograd.Function):
    """Looked-up rows forward; backward hands their gradients to `receive`, so no table needs a gradient.

    Pooled rows [B, F * D] leave as one [B, D] per feature, so that their gradients come back without being joined.
    `anchor` is any tensor that requires a gradient: without one autograd would not call backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: Tensor, width: int, receive: Callable[[Sequence[Tensor]], None]
    ) -> tuple[Tensor, ...]:
        ctx.receive = receive
        return torch.split(rows, width, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.receive(gradients)
        return None, None, None, None
