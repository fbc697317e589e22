"""The definition of `find_rows`, `sum_bags` and `update_rows` in torch; also used on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def find_rows(ids_N: Tensor, edges_F: Tensor, bases_F: Tensor) -> tuple[Tensor, Tensor]:
    rows_N = ids_N + torch.repeat_interleave(bases_F, edges_F.diff())
    rows_U, inverse_N = torch.unique(rows_N, return_inverse=True)
    return rows_U.int(), inverse_N.int()


def sum_bags(
    gradients: Sequence[Tensor], offsets: Tensor | None, inverse_N: Tensor, *, is_mean: bool, out: Tensor
) -> None:
    gradient = torch.cat(list(gradients))  # feature by feature, as ids lie
    if offsets is not None:
        lengths = offsets.diff()
        if is_mean:
            gradient = gradient / lengths.clamp(min=1)[:, None]
        gradient = torch.repeat_interleave(gradient, lengths, dim=0)
    out.zero_().index_add_(0, inverse_N.long(), gradient)


def update_rows(
    weights_HD: Tensor,
    state: Tensor | None,
    blocks: Sequence[tuple[Tensor, Tensor]],
    *,
    optimiser: str,
    lr: float,
    eps: float,
    scale: float,
) -> None:
    everyone = torch.cat([rows for rows, _ in blocks]).long()
    rows_U, inverse = torch.unique(everyone, return_inverse=True)
    sums_UD = weights_HD.new_zeros(len(rows_U), weights_HD.shape[1])
    sums_UD.index_add_(0, inverse, torch.cat([gradient for _, gradient in blocks]))
    sums_UD *= scale
    step = lr * sums_UD
    if optimiser != "sgd":
        assert state is not None
        squares = sums_UD**2
        state[rows_U] += squares if optimiser == "adagrad" else squares.mean(1)
        root = state[rows_U].sqrt() + eps
        step = step / (root if optimiser == "adagrad" else root[:, None])
    weights_HD[rows_U] -= step
