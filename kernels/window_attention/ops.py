"""Attention inside windows with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op


def _window_attention(
    packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    """(attended [T, D], logarithms of the sums of the softmax [H, T])."""
    packed_NE, starts_W, lengths_W = packed_NE.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    out_TD, log_sums_HT = _empty_outputs(packed_NE, starts_W, lengths_W, num_heads, num_values, num_threads)
    _cpu.window_attention(packed_NE, starts_W, lengths_W, out_TD, log_sums_HT, num_threads)
    return out_TD, log_sums_HT


def _empty_outputs(
    packed_NE: Tensor, _: Any, __: Any, num_heads: int, num_values: int, ___: int
) -> tuple[Tensor, Tensor]:
    return packed_NE.new_empty(num_values, packed_NE.shape[1] // 3), packed_NE.new_empty(num_heads, num_values)


def _window_attention_backward(
    packed_NE: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    out_TD: Tensor,
    log_sums_HT: Tensor,
    gradient_TD: Tensor,
    num_threads: int,
) -> Tensor:
    packed_NE, starts_W, lengths_W = packed_NE.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    found_NE = torch.zeros_like(packed_NE)
    saved = (packed_NE, starts_W, lengths_W, out_TD, log_sums_HT)
    _cpu.window_attention_backward(*saved, gradient_TD.contiguous(), found_NE, num_threads)
    return found_NE


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed_NE, starts_W, lengths_W, _, _, ctx.num_threads = inputs
    ctx.save_for_backward(packed_NE, starts_W, lengths_W, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient_TD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient_TD is None:
        return (None,) * 6
    return window_attention_backward(*ctx.saved_tensors, gradient_TD, ctx.num_threads), *[None] * 5


window_attention_backward = Op(
    "window_attention_backward", _window_attention_backward, fake=lambda packed_NE, *_: torch.empty_like(packed_NE)
)
window_attention = Op("window_attention", _window_attention, fake=_empty_outputs, keep=_keep, backward=_backward)
