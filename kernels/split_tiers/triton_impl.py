"""`split_tiers` on CUDA: one thread per id, with the population count written out.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from kernels.split_tiers.reference import check_ids

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def count_bits(word):  # type: ignore[no-untyped-def, unused-ignore]
    """The set bits of a uint64: sums of 2, 4 and 8 bits side by side, then of the bytes by one multiplication."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (word * 0x0101010101010101) >> 56


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def split_kernel(ids, bits, ranks, moved, tiers, slots, num_ids, common_tier, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = position < num_ids
    row = tl.load(ids + position, mask=mask, other=0).to(tl.int64)
    word = tl.load(bits + (row >> 6), mask=mask, other=0).to(tl.uint64, bitcast=True)
    bit = (row & 63).to(tl.uint64)
    one = tl.full([BLOCK], 1, tl.uint64)
    lower = count_bits(word & ((one << bit) - one)).to(tl.int64)
    below = tl.load(ranks + (row >> 6), mask=mask, other=0).to(tl.int64) + lower
    is_moved = ((word >> bit) & 1) == 1
    entry = tl.load(moved + below, mask=mask & is_moved, other=0)
    tl.store(tiers + position, tl.where(is_moved, entry & 7, common_tier).to(tl.uint8), mask=mask)
    tl.store(slots + position, tl.where(is_moved, entry >> 3, row - below), mask=mask)


def split_tiers(
    ids_N: Tensor, bits: Tensor, ranks: Tensor, moved_M: Tensor, num_rows: int, common_tier: int
) -> tuple[Tensor, Tensor]:
    check_ids(ids_N, num_rows)
    tiers_N = torch.empty(ids_N.shape, dtype=torch.uint8, device=ids_N.device)
    slots_N = torch.empty(ids_N.shape, dtype=torch.int64, device=ids_N.device)
    grid = (triton.cdiv(ids_N.numel(), BLOCK),)
    if ids_N.numel():
        split_kernel[grid](ids_N, bits, ranks, moved_M, tiers_N, slots_N, ids_N.numel(), common_tier, BLOCK=BLOCK)
    return tiers_N, slots_N
