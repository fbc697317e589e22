"""Shared lookups on CUDA: one program per list, which recomputes the hash of every element.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
Sums into the array are atomic, so on a GPU their order, and with it the last bits, may change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from kernels.shared_lookup.layout import BLOCK_FACTOR, FLAT_IDS, ID_FACTOR, MIX_FACTORS, signed

BLOCK = 64
# The bits of the unsigned factors as int64: products wrap around, so both are the same.
ID_STEP = tl.constexpr(signed(ID_FACTOR))
BLOCK_STEP = tl.constexpr(signed(BLOCK_FACTOR))
MIX_FIRST = tl.constexpr(signed(MIX_FACTORS[0]))
MIX_SECOND = tl.constexpr(signed(MIX_FACTORS[1]))
NUM_FLAT = tl.constexpr(FLAT_IDS)


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
def find_slots(feature, exact_ids, id, column, size, seed_key, block, IS_FOLD: tl.constexpr, IS_SIGNED: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """(slots, signs) of some columns of a row."""
    key, base, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    own = key + id * ID_STEP
    if IS_FOLD:
        is_flat = (id >= 0) & (id < NUM_FLAT)
        flat = tl.where(is_flat, base + id * dim, 0) + column
        words = mix_bits(seed_key + tl.where(is_flat, 0, own) + (flat // size) * BLOCK_STEP)
        slots = (flat % size + scale_hash(words, tl.maximum(size // block, 1)) * block) % size
    else:
        words = mix_bits(own + (column // block) * BLOCK_STEP)
        slots = scale_hash(words, size - block + 1) + column % block
    rank = find_exact(exact_ids + tl.load(feature + 5), tl.load(feature + 6), id)
    exact_width = tl.load(feature + 8)
    exact = tl.load(feature + 7) + rank * exact_width + column % exact_width
    slots = tl.where(rank >= 0, exact, slots)
    signs = 1 - 2 * (words & 1) if IS_SIGNED else words * 0 + 1
    return slots, tl.where(rank >= 0, 1, signs)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def lookup_kernel(  # type: ignore[no-untyped-def, unused-ignore]
    array, ids, offsets, weights, features, exact_ids, out, winners, num_samples, width, size, seed_key, block,
    IS_FOLD: tl.constexpr, IS_SIGNED: tl.constexpr, IS_POOLED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    feature = features + (bag // num_samples) * 9
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    dim, mode = tl.load(feature + 2), tl.load(feature + 3)
    target = (bag % num_samples) * width + tl.load(feature + 4)
    for at in range(0, dim, BLOCK):
        column = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < dim
        total = tl.zeros((BLOCK,), dtype=array.dtype.element_ty)
        winner = tl.full((BLOCK,), -1, dtype=tl.int32)
        for position in range(begin, end):
            id = tl.load(ids + position)
            slots, signs = find_slots(feature, exact_ids, id, column, size, seed_key, block, IS_FOLD, IS_SIGNED)
            value = tl.load(array + slots, mask=mask, other=0) * signs.to(array.dtype.element_ty)
            if HAS_WEIGHTS:
                value = value * tl.load(weights + position)
            if IS_POOLED:
                wins = (winner < 0) | (value > total) | ((value != value) & (total == total))
                total = tl.where(mode == 2, tl.where(wins, value, total), total + value)
                winner = tl.where(wins, (position - begin).to(tl.int32), winner)
            else:
                tl.store(out + position * width + column, value, mask=mask)
        if IS_POOLED:
            count = tl.where((mode == 1) & (end > begin), end - begin, 1)
            tl.store(out + target + column, total / count.to(array.dtype.element_ty), mask=mask)
            tl.store(winners + target + column, winner, mask=mask & (column * 0 + mode == 2))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def scatter_kernel(  # type: ignore[no-untyped-def, unused-ignore]
    array, gradient, ids, offsets, weights, features, exact_ids, winners, scale, num_samples, width, size, seed_key,
    block, IS_FOLD: tl.constexpr, IS_SIGNED: tl.constexpr, IS_POOLED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    feature = features + (bag // num_samples) * 9
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    dim, mode = tl.load(feature + 2), tl.load(feature + 3)
    source = (bag % num_samples) * width + tl.load(feature + 4)
    factor = tl.load(scale)
    if IS_POOLED:
        factor = factor / tl.where((mode == 1) & (end > begin), end - begin, 1).to(array.dtype.element_ty)
    for at in range(0, dim, BLOCK):
        column = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < dim
        for position in range(begin, end):
            start = source if IS_POOLED else position * width
            id = tl.load(ids + position)
            slots, signs = find_slots(feature, exact_ids, id, column, size, seed_key, block, IS_FOLD, IS_SIGNED)
            value = tl.load(gradient + start + column, mask=mask, other=0) * factor
            value = value * signs.to(array.dtype.element_ty)
            if HAS_WEIGHTS:
                value = value * tl.load(weights + position)
            is_mine = mask
            if HAS_MAX:
                winner = tl.load(winners + start + column, mask=mask, other=-1)
                is_mine = mask & ((column * 0 + mode != 2) | (winner == position - begin))
            tl.atomic_add(array + slots, value, mask=is_mine)


def _lists(ids: Tensor, offsets: Tensor, weights: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, offsets = ids.long().contiguous(), offsets.long().contiguous()
    return ids, offsets, ids if weights is None else weights.detach().to(like.dtype).contiguous()


def shared_lookup(
    array: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    width: int,
    is_pooled: bool,
    *,
    has_max: bool,
) -> tuple[Tensor, Tensor]:
    num_samples = (len(offsets) - 1) // len(features)
    shape = (num_samples if is_pooled else len(ids), width)
    out = array.new_zeros(shape)
    winners = torch.full(shape if has_max else (0,), -1, dtype=torch.int32, device=array.device)
    size, seed_key, block, is_fold, is_signed = layout
    lists = _lists(ids, offsets, weights, array)
    if len(offsets) > 1:
        lookup_kernel[(len(offsets) - 1,)](
            array.detach().contiguous(), *lists, features, exact_ids, out, winners, num_samples, width,
            size, seed_key, block, IS_FOLD=bool(is_fold), IS_SIGNED=bool(is_signed), IS_POOLED=is_pooled,
            HAS_WEIGHTS=weights is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out, winners


def shared_scatter(
    target: Tensor,
    gradient: Tensor,
    winners: Tensor,
    scale: float,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    width: int,
    is_pooled: bool,
) -> None:
    num_samples = (len(offsets) - 1) // len(features)
    size, seed_key, block, is_fold, is_signed = layout
    lists = _lists(ids, offsets, weights, target)
    if len(offsets) > 1:
        # As a tensor: a float argument would reach the kernel as float32.
        factor = torch.tensor([scale], dtype=target.dtype, device=target.device)
        scatter_kernel[(len(offsets) - 1,)](
            target, gradient.to(target.dtype).contiguous(), *lists, features, exact_ids, winners, factor, num_samples,
            width, size, seed_key, block, IS_FOLD=bool(is_fold), IS_SIGNED=bool(is_signed), IS_POOLED=is_pooled,
            HAS_WEIGHTS=weights is not None, HAS_MAX=winners.numel() > 0, BLOCK=BLOCK,
        )  # fmt: skip


def shared_weigh(
    array: Tensor,
    gradient: Tensor,
    ids: Tensor,
    offsets: Tensor,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    width: int,
    is_pooled: bool,
) -> Tensor:
    """Rows, then their products with the gradient of their list: as long as the ids, never ids x rows of indices."""
    num_samples = (len(offsets) - 1) // len(features)
    out = array.new_zeros(len(ids))
    for f, feature in enumerate(features.tolist()):
        bounds = offsets[f * num_samples : (f + 1) * num_samples + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        own, inside = features[f : f + 1].clone(), torch.tensor([0, last - first], device=ids.device)
        rows, _ = shared_lookup(
            array, ids[first:last], inside, None, own, exact_ids, layout, feature[2], False, has_max=False
        )
        if not is_pooled:
            out[first:last] = (rows * gradient[first:last]).sum(1)
            continue
        lengths = bounds.diff()
        owners = torch.repeat_interleave(torch.arange(num_samples, device=ids.device), lengths)
        vectors = gradient[:, feature[4] : feature[4] + feature[2]]
        if feature[3] == 1:
            vectors = vectors / lengths.clamp(min=1)[:, None]
        out[first:last] = (rows * vectors[owners]).sum(1)
    return out
