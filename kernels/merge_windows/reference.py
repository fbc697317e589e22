"""The definition of merging windows in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.windows import window_rows_of


def merge_windows(values_N: Tensor, starts_W: Tensor, lengths_W: Tensor) -> tuple[Tensor, Tensor]:
    is_covered_N = torch.zeros(len(values_N), dtype=torch.bool, device=values_N.device)
    is_covered_N[window_rows_of(starts_W, lengths_W)] = True
    place_N = torch.cumsum(is_covered_N, 0) - 1
    is_filled_W = lengths_W > 0
    new_starts_W = torch.zeros_like(starts_W)
    new_starts_W[is_filled_W] = place_N[starts_W[is_filled_W]]
    return values_N[is_covered_N], new_starts_W
