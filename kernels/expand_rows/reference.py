"""The definition of the expansions and of their gradients in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.take_rows import reference as take


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a gradient of `dtype` is summed in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def expand_rows(distinct_UD: Tensor, inverse_B: Tensor) -> Tensor:
    return distinct_UD.index_select(0, inverse_B)


def sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int) -> Tensor:
    """Row u is the sum of gradient_BD over inverse_B == u, from the first to the last row."""
    wide = wide_dtype(gradient_BD.dtype)
    sums_UD = torch.zeros(num_distinct, *gradient_BD.shape[1:], dtype=wide, device=gradient_BD.device)
    return sums_UD.index_add_(0, inverse_B, gradient_BD.to(wide)).to(gradient_BD.dtype)


def expand_offsets(offsets: Tensor, inverse_B: Tensor) -> Tensor:
    lengths_B = (offsets[1:] - offsets[:-1]).index_select(0, inverse_B)
    return torch.cat([offsets.new_zeros(1), torch.cumsum(lengths_B, 0)])


def expand_jagged(values: Tensor, offsets: Tensor, inverse_B: Tensor) -> Tensor:
    starts_B = offsets[:-1].index_select(0, inverse_B)
    return take.take_windows(values, starts_B, (offsets[1:] - offsets[:-1]).index_select(0, inverse_B))


def sum_jagged(gradient: Tensor, offsets: Tensor, inverse_B: Tensor, num_values: int) -> Tensor:
    """Each value's gradient is the sum over the samples that hold its list, from the first to the last."""
    sources = expand_jagged(torch.arange(num_values, device=gradient.device), offsets, inverse_B)
    return sum_rows(gradient, sources, num_values)
