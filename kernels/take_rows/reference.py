"""The definition of `take_rows` and `take_windows` in torch; also used on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.windows import window_rows_of


def take_rows(values: Sequence[Tensor], offsets: Sequence[Tensor], rows_U: Tensor) -> tuple[Tensor, Tensor]:
    taken, lengths = [], []
    for own, start in zip(values, offsets, strict=True):
        if len(rows_U) and not 0 <= int(rows_U.min()) <= int(rows_U.max()) < len(start) - 1:
            raise ValueError(f"rows_U: expected rows in [0, {len(start) - 1})")
        lengths_U = (start[1:] - start[:-1])[rows_U]
        taken.append(take_windows(own, start[:-1][rows_U], lengths_U))
        lengths.append(lengths_U)
    return torch.cat(taken), torch.cat(lengths)


def take_windows(values: Tensor, starts_W: Tensor, lengths_W: Tensor) -> Tensor:
    return values[window_rows_of(starts_W, lengths_W)]
