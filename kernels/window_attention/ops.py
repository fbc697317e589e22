"""Attention inside windows as a torch.library op, so that autograd and torch.compile know it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.buffers import address_of
from kernels.shortcut import shortcut


@torch.library.custom_op("recmill::window_attention", mutates_args=())
def window_attention(
    packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    """(attended [T, D], logarithms of the sums of the softmax [H, T])."""
    packed_NE, starts_W, lengths_W = packed_NE.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    width = packed_NE.shape[1] // 3
    if int(lengths_W.sum()) != num_values:
        raise ValueError(f"num_values is {num_values}, the windows hold {int(lengths_W.sum())} rows")
    out_TD, log_sums_HT = packed_NE.new_empty(num_values, width), packed_NE.new_empty(num_heads, num_values)
    _cpu.window_attention(
        address_of(packed_NE, name="packed_NE", dtypes=("float32",)),
        len(packed_NE),
        num_heads,
        width,
        address_of(starts_W, name="starts_W", dtypes=("int64",)),
        address_of(lengths_W, name="lengths_W", dtypes=("int64",)),
        len(starts_W),
        out_TD.data_ptr(),
        log_sums_HT.data_ptr(),
        num_threads,
    )
    return out_TD, log_sums_HT


@window_attention.register_fake
def _(
    packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    width = packed_NE.shape[1] // 3
    return packed_NE.new_empty(num_values, width), packed_NE.new_empty(num_heads, num_values)


@torch.library.custom_op("recmill::window_attention_backward", mutates_args=())
def window_attention_backward(
    packed_NE: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    out_TD: Tensor,
    log_sums_HT: Tensor,
    gradient_TD: Tensor,
    num_threads: int,
) -> Tensor:
    packed_NE, gradient_TD = packed_NE.contiguous(), gradient_TD.contiguous()
    starts_W, lengths_W = starts_W.contiguous(), lengths_W.contiguous()
    packed_gradient_NE = torch.zeros_like(packed_NE)
    _cpu.window_attention_backward(
        address_of(packed_NE, name="packed_NE", dtypes=("float32",)),
        len(packed_NE),
        log_sums_HT.shape[0],
        packed_NE.shape[1] // 3,
        address_of(starts_W, name="starts_W", dtypes=("int64",)),
        address_of(lengths_W, name="lengths_W", dtypes=("int64",)),
        len(starts_W),
        address_of(out_TD, name="out_TD", dtypes=("float32",)),
        address_of(log_sums_HT, name="log_sums_HT", dtypes=("float32",)),
        address_of(gradient_TD, name="gradient_TD", dtypes=("float32",)),
        packed_gradient_NE.data_ptr(),
        num_threads,
    )
    return packed_gradient_NE


@window_attention_backward.register_fake
def _(
    packed_NE: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    out_TD: Tensor,
    log_sums_HT: Tensor,
    gradient_TD: Tensor,
    num_threads: int,
) -> Tensor:
    return torch.empty_like(packed_NE)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed_NE, starts_W, lengths_W, _, _, ctx.num_threads = inputs
    ctx.save_for_backward(packed_NE, starts_W, lengths_W, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, gradient_TD: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, None, None, None, None, None]:
    found = None if gradient_TD is None else quick_backward(*ctx.saved_tensors, gradient_TD, ctx.num_threads)
    return found, None, None, None, None, None


window_attention.register_autograd(_backward, setup_context=_keep)
quick_window_attention = shortcut(window_attention, setup_context=_keep, backward=_backward)
quick_backward = shortcut(window_attention_backward)
