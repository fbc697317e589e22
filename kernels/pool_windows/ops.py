"""The pooling of windows with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op


def _pool_windows(
    rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor, num_threads: int
) -> tuple[Tensor, Tensor]:
    """(means [W, H, D], logarithms of the sums of the softmax [W, H])."""
    rows_ND, starts_W, lengths_W = rows_ND.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    scores_NH = None if scores_NH is None else scores_NH.contiguous()
    out_WHD, log_sums_WH = _empty_outputs(rows_ND, scores_NH, starts_W)
    _cpu.pool_windows(rows_ND, scores_NH, starts_W, lengths_W, out_WHD, log_sums_WH, num_threads)
    return out_WHD, log_sums_WH


def _empty_outputs(rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_windows, num_heads = starts_W.shape[0], 1 if scores_NH is None else scores_NH.shape[1]
    return rows_ND.new_empty(num_windows, num_heads, rows_ND.shape[1]), rows_ND.new_empty(num_windows, num_heads)


def _pool_windows_backward(
    rows_ND: Tensor,
    scores_NH: Tensor | None,
    starts_W: Tensor,
    lengths_W: Tensor,
    out_WHD: Tensor,
    log_sums_WH: Tensor,
    gradient_WHD: Tensor,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    """(gradient of the rows [N, D], of the scores [N, H])."""
    rows_ND, starts_W, lengths_W = rows_ND.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    scores_NH = None if scores_NH is None else scores_NH.contiguous()
    gradients = _zero_gradients(rows_ND, scores_NH)
    inputs = (rows_ND, scores_NH, starts_W, lengths_W, out_WHD, log_sums_WH, gradient_WHD.contiguous())
    _cpu.pool_windows_backward(*inputs, *gradients, num_threads)
    return gradients


def _zero_gradients(rows_ND: Tensor, scores_NH: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    scores = rows_ND.new_zeros(0, 1) if scores_NH is None else torch.zeros_like(scores_NH)
    return torch.zeros_like(rows_ND), scores


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.num_threads = inputs
    ctx.has_scores = inputs[1] is not None
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient_WHD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient_WHD is None:
        return None, None, None, None, None
    rows, scores = pool_windows_backward(*ctx.saved_tensors, gradient_WHD, ctx.num_threads)
    return rows, scores if ctx.has_scores else None, None, None, None


pool_windows_backward = Op("pool_windows_backward", _pool_windows_backward, fake=_zero_gradients)
pool_windows = Op("pool_windows", _pool_windows, fake=_empty_outputs, keep=_keep, backward=_backward)
