"""Shared lookups on CUDA: one program per list, which recomputes the hash of every element.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
Sums into the array are atomic, so on a GPU their order, and with it the last bits, may change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from kernels.shared_lookup.layout import BLOCK_FACTOR, ID_FACTOR, MIX_FACTORS, signed

BLOCK = 64
# The bits of the unsigned factors as int64: products wrap around, so both are the same.
ID_STEP = tl.constexpr(signed(ID_FACTOR))
BLOCK_STEP = tl.constexpr(signed(BLOCK_FACTOR))
MIX_FIRST = tl.constexpr(signed(MIX_FACTORS[0]))
MIX_SECOND = tl.constexpr(signed(MIX_FACTORS[1]))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def mix_bits(words):  # type: ignore[no-untyped-def, unused-ignore]
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * MIX_FIRST
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * MIX_SECOND
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def scale_hash(words, limit):  # type: ignore[no-untyped-def, unused-ignore]
    """The upper 64 bits of the product, sixteen bits of the word at a time, as the reference has it."""
    total = ((words & 0xFFFF) * limit) >> 16
    total = (total + ((words >> 16) & 0xFFFF) * limit) >> 16
    total = (total + ((words >> 32) & 0xFFFF) * limit) >> 16
    return (total + ((words >> 48) & 0xFFFF) * limit) >> 16


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def find_exact(exact, count, id):  # type: ignore[no-untyped-def, unused-ignore]
    """The rank of an id among ascending exact ids, or -1."""
    base = id * 0
    left = count
    while left > 1:
        half = left // 2
        base = tl.where(tl.load(exact + base + half) <= id, base + half, base)
        left -= half
    rank = id * 0 - 1
    if count > 0:
        rank = tl.where(tl.load(exact + base) == id, base, rank)
    return rank


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def find_slots(feature, exact_ids, id, column, size, block):  # type: ignore[no-untyped-def, unused-ignore]
    """The slots of some columns of a row."""
    words = mix_bits(tl.load(feature) + id * ID_STEP + (column // block) * BLOCK_STEP)
    slots = scale_hash(words, size - block + 1) + column % block
    rank = find_exact(exact_ids + tl.load(feature + 4), tl.load(feature + 5), id)
    exact_width = tl.load(feature + 7)
    exact = tl.load(feature + 6) + rank * exact_width + column % exact_width
    return tl.where(rank >= 0, exact, slots)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def walk_kernel(  # type: ignore[no-untyped-def, unused-ignore]
    array, vectors, ids, offsets, features, exact_ids, scale, num_samples, width, size, block,
    IS_POOLED: tl.constexpr, IS_SCATTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One list: its vector from the array, or with IS_SCATTER its vector's gradient into the array."""
    bag = tl.program_id(0).to(tl.int64)
    feature = features + (bag // num_samples) * 8
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    dim, is_mean = tl.load(feature + 1), tl.load(feature + 2)
    count = tl.where((is_mean != 0) & (end > begin), end - begin, 1).to(array.dtype.element_ty)
    own = (bag % num_samples) * width + tl.load(feature + 3)
    for at in range(0, dim, BLOCK):
        column = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < dim
        total = tl.zeros((BLOCK,), dtype=array.dtype.element_ty)
        for position in range(begin, end):
            place = (own if IS_POOLED else position * width) + column
            slots = find_slots(feature, exact_ids, tl.load(ids + position), column, size, block)
            if IS_SCATTER:
                factor = tl.load(scale) / count if IS_POOLED else tl.load(scale)
                tl.atomic_add(array + slots, tl.load(vectors + place, mask=mask, other=0) * factor, mask=mask)
            else:
                value = tl.load(array + slots, mask=mask, other=0)
                total += value
                if not IS_POOLED:
                    tl.store(vectors + place, value, mask=mask)
        if IS_POOLED and not IS_SCATTER:
            tl.store(vectors + own + column, total / count, mask=mask)


def _walk(
    array: Tensor,
    vectors: Tensor,
    scale: float | None,
    ids: Tensor,
    offsets: Tensor,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    width: int,
    is_pooled: bool,
) -> None:
    """A lookup, or with `scale` a scatter."""
    if len(offsets) == 1:
        return
    # As a tensor: a float argument would reach the kernel as float32.
    factor = torch.tensor([scale or 0], dtype=array.dtype, device=array.device)
    walk_kernel[(len(offsets) - 1,)](
        array, vectors, ids.long().contiguous(), offsets.long().contiguous(), features, exact_ids, factor,
        (len(offsets) - 1) // len(features), width, *layout, IS_POOLED=is_pooled, IS_SCATTER=scale is not None,
        BLOCK=BLOCK,
    )  # fmt: skip


def shared_lookup(array: Tensor, ids: Tensor, offsets: Tensor, features: Tensor, *described: Any) -> Tensor:
    *_, width, is_pooled = described
    out = array.new_zeros((len(offsets) - 1) // len(features) if is_pooled else len(ids), width)
    _walk(array.detach().contiguous(), out, None, ids, offsets, features, *described)
    return out


def shared_scatter(target: Tensor, gradient: Tensor, scale: float, *described: Any) -> None:
    _walk(target, gradient.to(target.dtype).contiguous(), scale, *described)
