"""The expansions on CUDA. Dense rows are lists of one vector, so two kernels serve all four ops.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_kernel(values, offsets, inverse, expanded, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """One program per sample: out[expanded[b]:] = the list inverse[b]."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(offsets + tl.load(inverse + row)) * width
    target = tl.load(expanded + row) * width
    size = tl.load(expanded + row + 1) * width - target
    for at in range(0, size, BLOCK):
        position = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = position < size
        tl.store(out + target + position, tl.load(values + source + position, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sum_kernel(gradient, offsets, starts, rows, expanded, out, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """One program per distinct list: its copies are rows[starts[u]:starts[u + 1]], added from the first to the last."""
    u = tl.program_id(0).to(tl.int64)
    target = tl.load(offsets + u) * width
    size = tl.load(offsets + u + 1) * width - target
    first, last = tl.load(starts + u), tl.load(starts + u + 1)
    for at in range(0, size, BLOCK):
        position = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = position < size
        total = tl.zeros((BLOCK,), dtype=WIDE)
        for member in range(first, last):
            source = tl.load(expanded + tl.load(rows + member)) * width
            total += tl.load(gradient + source + position, mask=mask, other=0).to(WIDE)
        tl.store(out + target + position, total.to(out.dtype.element_ty), mask=mask)


def width_of(values: Tensor) -> int:
    return values[:1].numel() if len(values) else 1


def expand_jagged(
    values: Tensor, offsets: Tensor, inverse_B: Tensor, expanded_offsets: Tensor, num_values: int
) -> Tensor:
    out = values.new_empty(num_values, *values.shape[1:])
    if num_values:
        grid = (len(inverse_B),)
        copy_kernel[grid](values, offsets, inverse_B, expanded_offsets, out, width_of(values), BLOCK=BLOCK)
    return out


def sum_jagged(
    gradient: Tensor, offsets: Tensor, inverse_B: Tensor, expanded_offsets: Tensor, num_values: int
) -> Tensor:
    out = gradient.new_zeros(num_values, *gradient.shape[1:])
    num_distinct = len(offsets) - 1
    rows_B = torch.argsort(inverse_B, stable=True)
    starts = torch.zeros(num_distinct + 1, dtype=torch.int64, device=gradient.device)
    starts[1:] = torch.cumsum(torch.bincount(inverse_B, minlength=num_distinct), 0)
    wide = tl.float64 if gradient.dtype == torch.float64 else tl.float32
    if num_values and num_distinct:
        sum_kernel[(num_distinct,)](
            gradient, offsets, starts, rows_B, expanded_offsets, out, width_of(out), WIDE=wide, BLOCK=BLOCK
        )
    return out


def expand_rows(distinct_UD: Tensor, inverse_B: Tensor) -> Tensor:
    offsets = torch.arange(len(distinct_UD) + 1, device=distinct_UD.device)
    expanded = torch.arange(len(inverse_B) + 1, device=distinct_UD.device)
    return expand_jagged(distinct_UD, offsets, inverse_B, expanded, len(inverse_B))


def sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int) -> Tensor:
    offsets = torch.arange(num_distinct + 1, device=gradient_BD.device)
    expanded = torch.arange(len(inverse_B) + 1, device=gradient_BD.device)
    return sum_jagged(gradient_BD, offsets, inverse_B, expanded, num_distinct)
