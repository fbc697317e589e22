"""The compiled pooling of windows as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu


def pool(
    rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The result without autograd, and what the gradient needs."""
    scores_NH = None if scores_NH is None else scores_NH.contiguous()
    inputs = rows_ND.contiguous(), scores_NH, starts_W.contiguous(), lengths_W.contiguous()
    num_heads = 1 if scores_NH is None else scores_NH.shape[1]
    out_WHD = rows_ND.new_empty(len(starts_W), num_heads, rows_ND.shape[1])
    log_sums_WH = rows_ND.new_empty(len(starts_W), num_heads)  # logarithms of the sums of the softmax
    _cpu.pool_windows(*inputs, out_WHD, log_sums_WH)
    return out_WHD, (*inputs, out_WHD, log_sums_WH)


class PoolWindows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor) -> Tensor:
        out_WHD, kept = pool(rows_ND, scores_NH, starts_W, lengths_W)
        ctx.save_for_backward(*kept)
        return out_WHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_WHD: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, scores_NH, *_ = ctx.saved_tensors
        of_scores = rows_ND.new_empty(0) if scores_NH is None else torch.zeros_like(scores_NH)
        of_rows = torch.zeros_like(rows_ND)
        _cpu.pool_windows_backward(*ctx.saved_tensors, gradient_WHD.contiguous(), of_rows, of_scores)
        return of_rows, None if scores_NH is None else of_scores, None, None
