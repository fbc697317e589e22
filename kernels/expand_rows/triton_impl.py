"""The expansion and the sum of its rows on CUDA.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_kernel(values, inverse, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """One program per sample: out[b] = values[inverse[b]]."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(inverse + row) * width
    for at in range(0, width, BLOCK):
        position = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = position < width
        tl.store(out + row * width + position, tl.load(values + source + position, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sum_kernel(gradient, starts, rows, out, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """One program per distinct row: its copies are rows[starts[u]:starts[u + 1]], added from the first to the last."""
    u = tl.program_id(0).to(tl.int64)
    first, last = tl.load(starts + u), tl.load(starts + u + 1)
    for at in range(0, width, BLOCK):
        position = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = position < width
        total = tl.zeros((BLOCK,), dtype=WIDE)
        for member in range(first, last):
            source = tl.load(rows + member) * width
            total += tl.load(gradient + source + position, mask=mask, other=0).to(WIDE)
        tl.store(out + u * width + position, total.to(out.dtype.element_ty), mask=mask)


def expand_rows(distinct_UD: Tensor, inverse_B: Tensor) -> Tensor:
    out_BD = distinct_UD.new_empty(len(inverse_B), *distinct_UD.shape[1:])
    if out_BD.numel():
        copy_kernel[(len(inverse_B),)](distinct_UD, inverse_B, out_BD, out_BD[0].numel(), BLOCK=BLOCK)
    return out_BD


def sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int) -> Tensor:
    out_UD = gradient_BD.new_zeros(num_distinct, *gradient_BD.shape[1:])
    rows_B = torch.argsort(inverse_B, stable=True)
    starts = torch.zeros(num_distinct + 1, dtype=torch.int64, device=gradient_BD.device)
    starts[1:] = torch.cumsum(torch.bincount(inverse_B, minlength=num_distinct), 0)
    wide = tl.float64 if gradient_BD.dtype == torch.float64 else tl.float32
    if out_UD.numel():
        width = out_UD[0].numel()
        sum_kernel[(num_distinct,)](gradient_BD, starts, rows_B, out_UD, width, WIDE=wide, BLOCK=BLOCK)
    return out_UD
