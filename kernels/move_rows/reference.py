"""The definition of `move_rows` and `find_changed` in torch; also used on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _rows_of(matrix: Tensor, rows_N: Tensor | None, num_rows: int) -> Tensor:
    return matrix[:num_rows] if rows_N is None else matrix[rows_N]


def move_rows(source_RD: Tensor, target_HD: Tensor, source_rows_N: Tensor | None, target_rows_N: Tensor | None) -> None:
    count = next((len(rows) for rows in (source_rows_N, target_rows_N) if rows is not None), len(source_RD))
    values = _rows_of(source_RD, source_rows_N, count).to(target_HD.device)
    if target_rows_N is None:
        target_HD[:count] = values
    else:
        target_HD[target_rows_N] = values


def find_changed(
    held: Sequence[Tensor], live: Sequence[Tensor], held_rows_N: Tensor | None, live_rows_N: Tensor | None
) -> Tensor:
    count = next((len(rows) for rows in (held_rows_N, live_rows_N) if rows is not None), len(held[0]))
    differs_N = torch.zeros(count, dtype=torch.bool, device=held[0].device)
    for a, b in zip(held, live, strict=True):
        own, other = (
            _rows_of(matrix, rows, count).contiguous().view(torch.int32)
            for matrix, rows in ((a, held_rows_N), (b, live_rows_N))
        )
        differs_N |= (own != other).any(1) if own.dim() == 2 else own != other
    return differs_N.nonzero().squeeze(1)
