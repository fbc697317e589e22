"""The expansions with their gradients.

Forward and backward are ops of their own and each is the other's derivative, so gradients of any order work.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op
from kernels.take_rows import take_windows


def _expand_rows(distinct_UD: Tensor, inverse_B: Tensor, kernel: str, num_threads: int) -> Tensor:
    distinct_UD, inverse_B = distinct_UD.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.expand_rows(distinct_UD, inverse_B)
    out_BD = distinct_UD.new_empty(len(inverse_B), *distinct_UD.shape[1:])
    _cpu.expand_rows(distinct_UD, inverse_B, out_BD, num_threads)
    return out_BD


def _sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int, kernel: str, num_threads: int) -> Tensor:
    gradient_BD, inverse_B = gradient_BD.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.sum_rows(gradient_BD, inverse_B, num_distinct)
    out_UD = gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:])
    _cpu.sum_rows(gradient_BD, inverse_B, out_UD, num_threads)
    return out_UD


def _expand_jagged(
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


def _sum_jagged(
    gradient: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    expanded_offsets: Tensor,
    num_values: int,
    kernel: str,
    num_threads: int,
) -> Tensor:
    gradient, inverse_B = gradient.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.sum_jagged(gradient, offsets, inverse_B, expanded_offsets, num_values)
    out = gradient.new_zeros(num_values, *gradient.shape[1:])  # values outside of all lists have no gradient
    _cpu.sum_jagged(gradient, expanded_offsets.contiguous(), inverse_B, offsets, out, num_threads)
    return out


def _keep_for_expand_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    distinct_UD, inverse_B, *ctx.options = inputs
    ctx.save_for_backward(inverse_B)
    ctx.num_distinct = distinct_UD.shape[0]


def _expand_rows_backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor | None, ...]:
    return sum_rows(gradient_BD, *ctx.saved_tensors, ctx.num_distinct, *ctx.options), None, None, None


def _keep_for_sum_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, inverse_B, _, *ctx.options = inputs
    ctx.save_for_backward(inverse_B)


def _sum_rows_backward(ctx: Any, gradient_UD: Tensor) -> tuple[Tensor | None, ...]:
    return expand_rows(gradient_UD, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _keep_for_jagged(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, inverse_B, expanded_offsets, _, *ctx.options = inputs
    ctx.save_for_backward(offsets, inverse_B, expanded_offsets)
    ctx.num_values = values.shape[0]


def _expand_jagged_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return sum_jagged(gradient, *ctx.saved_tensors, ctx.num_values, *ctx.options), *[None] * 6


def _sum_jagged_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return expand_jagged(gradient, *ctx.saved_tensors, ctx.num_values, *ctx.options), *[None] * 6


expand_rows = Op(
    "expand_rows",
    _expand_rows,
    fake=lambda distinct_UD, inverse_B, *_: distinct_UD.new_empty(inverse_B.shape[0], *distinct_UD.shape[1:]),
    keep=_keep_for_expand_rows,
    backward=_expand_rows_backward,
)
sum_rows = Op(
    "sum_rows",
    _sum_rows,
    fake=lambda gradient_BD, _, num_distinct, *__: gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:]),
    keep=_keep_for_sum_rows,
    backward=_sum_rows_backward,
)
expand_jagged = Op(
    "expand_jagged",
    _expand_jagged,
    fake=lambda values, *rest: values.new_empty(rest[3], *values.shape[1:]),
    keep=_keep_for_jagged,
    backward=_expand_jagged_backward,
)
sum_jagged = Op(
    "sum_jagged",
    _sum_jagged,
    fake=lambda gradient, *rest: gradient.new_empty(rest[3], *gradient.shape[1:]),
    keep=_keep_for_jagged,
    backward=_sum_jagged_backward,
)
