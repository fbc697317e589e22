"""The pooling of windows as a torch.library op, so that autograd and torch.compile know it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.buffers import address_of
from kernels.shortcut import shortcut


def _scores_address(scores_NH: Tensor | None) -> int:
    return 0 if scores_NH is None else address_of(scores_NH, name="scores_NH", dtypes=("float32",))


@torch.library.custom_op("recmill::pool_windows", mutates_args=())
def pool_windows(
    rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor, num_threads: int
) -> tuple[Tensor, Tensor]:
    """(means [W, H, D], logarithms of the sums of the softmax [W, H])."""
    rows_ND, starts_W, lengths_W = rows_ND.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    scores_NH = None if scores_NH is None else scores_NH.contiguous()
    num_heads = 1 if scores_NH is None else scores_NH.shape[1]
    out_WHD = rows_ND.new_empty(len(starts_W), num_heads, rows_ND.shape[1])
    log_sums_WH = rows_ND.new_empty(len(starts_W), num_heads)
    _cpu.pool_windows(
        address_of(rows_ND, name="rows_ND", dtypes=("float32",)),
        _scores_address(scores_NH),
        len(rows_ND),
        rows_ND.shape[1],
        num_heads,
        address_of(starts_W, name="starts_W", dtypes=("int64",)),
        address_of(lengths_W, name="lengths_W", dtypes=("int64",)),
        len(starts_W),
        out_WHD.data_ptr(),
        log_sums_WH.data_ptr(),
        num_threads,
    )
    return out_WHD, log_sums_WH


@pool_windows.register_fake
def _(
    rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor, num_threads: int
) -> tuple[Tensor, Tensor]:
    num_heads = 1 if scores_NH is None else scores_NH.shape[1]
    return (
        rows_ND.new_empty(starts_W.shape[0], num_heads, rows_ND.shape[1]),
        rows_ND.new_empty(starts_W.shape[0], num_heads),
    )


@torch.library.custom_op("recmill::pool_windows_backward", mutates_args=())
def pool_windows_backward(
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
    rows_ND, gradient_WHD = rows_ND.contiguous(), gradient_WHD.contiguous()
    starts_W, lengths_W = starts_W.contiguous(), lengths_W.contiguous()
    scores_NH = None if scores_NH is None else scores_NH.contiguous()
    row_gradient_ND = torch.zeros_like(rows_ND)
    score_gradient_NH = rows_ND.new_zeros(0 if scores_NH is None else len(rows_ND), log_sums_WH.shape[1])
    _cpu.pool_windows_backward(
        address_of(rows_ND, name="rows_ND", dtypes=("float32",)),
        _scores_address(scores_NH),
        len(rows_ND),
        rows_ND.shape[1],
        log_sums_WH.shape[1],
        address_of(starts_W, name="starts_W", dtypes=("int64",)),
        address_of(lengths_W, name="lengths_W", dtypes=("int64",)),
        len(starts_W),
        address_of(out_WHD, name="out_WHD", dtypes=("float32",)),
        address_of(log_sums_WH, name="log_sums_WH", dtypes=("float32",)),
        address_of(gradient_WHD, name="gradient_WHD", dtypes=("float32",)),
        row_gradient_ND.data_ptr(),
        score_gradient_NH.data_ptr(),
        num_threads,
    )
    return row_gradient_ND, score_gradient_NH


@pool_windows_backward.register_fake
def _(
    rows_ND: Tensor,
    scores_NH: Tensor | None,
    starts_W: Tensor,
    lengths_W: Tensor,
    out_WHD: Tensor,
    log_sums_WH: Tensor,
    gradient_WHD: Tensor,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    num_scores = 0 if scores_NH is None else rows_ND.shape[0]
    return torch.empty_like(rows_ND), rows_ND.new_empty(num_scores, log_sums_WH.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows_ND, ctx.has_scores, starts_W, lengths_W, ctx.num_threads = inputs[0], inputs[1] is not None, *inputs[2:]
    ctx.save_for_backward(rows_ND, inputs[1], starts_W, lengths_W, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, gradient_WHD: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    if gradient_WHD is None:
        return None, None, None, None, None
    rows, scores = quick_backward(*ctx.saved_tensors, gradient_WHD, ctx.num_threads)
    return rows, scores if ctx.has_scores else None, None, None, None


pool_windows.register_autograd(_backward, setup_context=_keep)
quick_pool_windows = shortcut(pool_windows, setup_context=_keep, backward=_backward)
quick_backward = shortcut(pool_windows_backward)
