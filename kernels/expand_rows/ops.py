"""The expansions as torch.library ops, so that autograd, torch.compile and torch.export know them.

Forward and backward are ops of their own and each is the other's derivative, so gradients of any order work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.buffers import address_of
from kernels.jagged import item_bytes
from kernels.shortcut import shortcut
from kernels.take_rows import take_windows

SUMS = {
    torch.float32: (_cpu.sum_rows_float32, _cpu.sum_jagged_float32),
    torch.float64: (_cpu.sum_rows_float64, _cpu.sum_jagged_float64),
    torch.bfloat16: (_cpu.sum_rows_bfloat16, _cpu.sum_jagged_bfloat16),
}


def _check_gradient(gradient: Tensor) -> None:
    if gradient.dtype not in SUMS:
        raise ValueError(f"gradient: dtype is {gradient.dtype}, expected one of {', '.join(map(str, SUMS))}")


@torch.library.custom_op("recmill::expand_rows", mutates_args=())
def expand_rows(distinct_UD: Tensor, inverse_B: Tensor, kernel: str, num_threads: int) -> Tensor:
    distinct_UD, inverse_B = distinct_UD.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.expand_rows(distinct_UD, inverse_B)
    out_BD = distinct_UD.new_empty(len(inverse_B), *distinct_UD.shape[1:])
    _cpu.expand_rows(
        address_of(distinct_UD, name="distinct_UD"),
        len(distinct_UD),
        item_bytes(distinct_UD),
        address_of(inverse_B, name="inverse_B"),
        len(inverse_B),
        out_BD.data_ptr(),
        num_threads,
    )
    return out_BD


@expand_rows.register_fake
def _(distinct_UD: Tensor, inverse_B: Tensor, kernel: str, num_threads: int) -> Tensor:
    return distinct_UD.new_empty(inverse_B.shape[0], *distinct_UD.shape[1:])


@torch.library.custom_op("recmill::sum_rows", mutates_args=())
def sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int, kernel: str, num_threads: int) -> Tensor:
    gradient_BD, inverse_B = gradient_BD.contiguous(), inverse_B.long().contiguous()
    _check_gradient(gradient_BD)
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.sum_rows(gradient_BD, inverse_B, num_distinct)
    out_UD = gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:])
    SUMS[gradient_BD.dtype][0](
        address_of(gradient_BD, name="gradient_BD"),
        len(gradient_BD),
        out_UD[:1].numel() if num_distinct else 0,
        address_of(inverse_B, name="inverse_B"),
        out_UD.data_ptr(),
        num_distinct,
        num_threads,
    )
    return out_UD


@sum_rows.register_fake
def _(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int, kernel: str, num_threads: int) -> Tensor:
    return gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:])


@torch.library.custom_op("recmill::expand_jagged", mutates_args=())
def expand_jagged(
    values: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    expanded_offsets: Tensor,
    num_values: int,
    kernel: str,
    num_threads: int,
) -> Tensor:
    values, inverse_B = values.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.expand_jagged(values, offsets, inverse_B, expanded_offsets, num_values)
    starts_B = offsets[:-1].index_select(0, inverse_B)
    return take_windows(values, starts_B, expanded_offsets.diff(), num_values=num_values, num_threads=num_threads)


@expand_jagged.register_fake
def _(
    values: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    expanded_offsets: Tensor,
    num_values: int,
    kernel: str,
    num_threads: int,
) -> Tensor:
    return values.new_empty(num_values, *values.shape[1:])


@torch.library.custom_op("recmill::sum_jagged", mutates_args=())
def sum_jagged(
    gradient: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    expanded_offsets: Tensor,
    num_values: int,
    kernel: str,
    num_threads: int,
) -> Tensor:
    gradient, inverse_B = gradient.contiguous(), inverse_B.long().contiguous()
    _check_gradient(gradient)
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.sum_jagged(gradient, offsets, inverse_B, expanded_offsets, num_values)
    out = gradient.new_zeros(num_values, *gradient.shape[1:])  # values that no list holds get no gradient
    SUMS[gradient.dtype][1](
        address_of(gradient, name="gradient"),
        len(gradient),
        out[:1].numel() if num_values else 0,
        address_of(expanded_offsets.contiguous(), name="expanded_offsets", dtypes=("int64",)),
        address_of(inverse_B, name="inverse_B"),
        len(inverse_B),
        address_of(offsets, name="offsets", dtypes=("int64",)),
        len(offsets) - 1,
        out.data_ptr(),
        num_values,
        num_threads,
    )
    return out


@sum_jagged.register_fake
def _(
    gradient: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    expanded_offsets: Tensor,
    num_values: int,
    kernel: str,
    num_threads: int,
) -> Tensor:
    return gradient.new_empty(num_values, *gradient.shape[1:])


def _keep_for_expand_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    distinct_UD, inverse_B, *ctx.options = inputs
    ctx.save_for_backward(inverse_B)
    ctx.num_distinct = distinct_UD.shape[0]


def _expand_rows_backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor, None, None, None]:
    (inverse_B,) = ctx.saved_tensors
    return quick_sum_rows(gradient_BD, inverse_B, ctx.num_distinct, *ctx.options), None, None, None


def _keep_for_sum_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, inverse_B, _, *ctx.options = inputs
    ctx.save_for_backward(inverse_B)


def _sum_rows_backward(ctx: Any, gradient_UD: Tensor) -> tuple[Tensor, None, None, None, None]:
    (inverse_B,) = ctx.saved_tensors
    return quick_expand_rows(gradient_UD, inverse_B, *ctx.options), None, None, None, None


def _keep_for_jagged(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, inverse_B, expanded_offsets, _, *ctx.options = inputs
    ctx.save_for_backward(offsets, inverse_B, expanded_offsets)
    ctx.num_values = values.shape[0]


def _expand_jagged_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
    summed = sum_jagged(gradient, *ctx.saved_tensors, ctx.num_values, *ctx.options)
    return summed, None, None, None, None, None, None


def _sum_jagged_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
    expanded = expand_jagged(gradient, *ctx.saved_tensors, ctx.num_values, *ctx.options)
    return expanded, None, None, None, None, None, None


expand_rows.register_autograd(_expand_rows_backward, setup_context=_keep_for_expand_rows)
sum_rows.register_autograd(_sum_rows_backward, setup_context=_keep_for_sum_rows)
expand_jagged.register_autograd(_expand_jagged_backward, setup_context=_keep_for_jagged)
sum_jagged.register_autograd(_sum_jagged_backward, setup_context=_keep_for_jagged)

quick_expand_rows = shortcut(expand_rows, setup_context=_keep_for_expand_rows, backward=_expand_rows_backward)
quick_sum_rows = shortcut(sum_rows, setup_context=_keep_for_sum_rows, backward=_sum_rows_backward)
