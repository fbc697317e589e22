"""Pointwise attention inside windows with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op


def _pointwise_attention(
    packed_NE: Tensor,
    bias_R: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    num_heads: int,
    num_out: int,
    scale: float,
    is_last_only: bool,
    num_threads: int,
) -> Tensor:
    inputs = (packed_NE.contiguous(), bias_R.contiguous(), starts_W.contiguous(), lengths_W.contiguous())
    out_QD = packed_NE.new_empty(num_out, packed_NE.shape[1] // 3)
    _cpu.pointwise_attention(*inputs, out_QD, num_heads, scale, is_last_only, num_threads)
    return out_QD


def _pointwise_attention_backward(
    packed_NE: Tensor,
    bias_R: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    gradient_QD: Tensor,
    num_heads: int,
    scale: float,
    is_last_only: bool,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    """(gradient of the packed rows [N, 3 * D], of the bias [R])."""
    inputs = (packed_NE.contiguous(), bias_R.contiguous(), starts_W.contiguous(), lengths_W.contiguous())
    found = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[1])
    _cpu.pointwise_attention_backward(
        *inputs, gradient_QD.contiguous(), *found, num_heads, scale, is_last_only, num_threads
    )
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed_NE, bias_R, starts_W, lengths_W, num_heads, _, *options = inputs
    ctx.save_for_backward(packed_NE, bias_R, starts_W, lengths_W)
    ctx.options = (num_heads, *options)


def _backward(ctx: Any, gradient_QD: Tensor) -> tuple[Tensor | None, ...]:
    return *pointwise_attention_backward(*ctx.saved_tensors, gradient_QD, *ctx.options), *[None] * 7


pointwise_attention_backward = Op(
    "pointwise_attention_backward",
    _pointwise_attention_backward,
    fake=lambda packed_NE, bias_R, *_: (torch.empty_like(packed_NE), torch.empty_like(bias_R)),
)
pointwise_attention = Op(
    "pointwise_attention",
    _pointwise_attention,
    fake=lambda packed_NE, *rest: packed_NE.new_empty(rest[4], packed_NE.shape[1] // 3),
    keep=_keep,
    backward=_backward,
)
