"""The expansion and the sum of its rows: each is the other's derivative, so gradients of any order work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op


def _expand_rows(distinct_UD: Tensor, inverse_B: Tensor, kernel: str) -> Tensor:
    distinct_UD, inverse_B = distinct_UD.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.expand_rows(distinct_UD, inverse_B)
    out_BD = distinct_UD.new_empty(len(inverse_B), *distinct_UD.shape[1:])
    _cpu.expand_rows(distinct_UD, inverse_B, out_BD)
    return out_BD


def _sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int, kernel: str) -> Tensor:
    if gradient_BD.dtype == torch.bfloat16:  # summed in float32, rounded once
        return _sum_rows(gradient_BD.float(), inverse_B, num_distinct, kernel).bfloat16()
    gradient_BD, inverse_B = gradient_BD.contiguous(), inverse_B.long().contiguous()
    if kernel == "triton":
        from kernels.expand_rows import triton_impl

        return triton_impl.sum_rows(gradient_BD, inverse_B, num_distinct)
    out_UD = gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:])
    _cpu.sum_rows(gradient_BD, inverse_B, out_UD)
    return out_UD


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, inverse_B, *_, ctx.kernel = inputs
    ctx.save_for_backward(inverse_B)
    ctx.num_rows = rows.shape[0]


def _expand_rows_backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor | None, ...]:
    return sum_rows(gradient_BD, *ctx.saved_tensors, ctx.num_rows, ctx.kernel), None, None


def _sum_rows_backward(ctx: Any, gradient_UD: Tensor) -> tuple[Tensor | None, ...]:
    return expand_rows(gradient_UD, *ctx.saved_tensors, ctx.kernel), None, None, None


expand_rows = Op(
    "expand_rows",
    _expand_rows,
    fake=lambda distinct_UD, inverse_B, *_: distinct_UD.new_empty(inverse_B.shape[0], *distinct_UD.shape[1:]),
    keep=_keep,
    backward=_expand_rows_backward,
)
sum_rows = Op(
    "sum_rows",
    _sum_rows,
    fake=lambda gradient_BD, _, num_distinct, *__: gradient_BD.new_empty(num_distinct, *gradient_BD.shape[1:]),
    keep=_keep,
    backward=_sum_rows_backward,
)
