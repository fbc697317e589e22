"""`dedup_rows` on CUDA: hash each row, sort the hashes, compare neighbours exactly.

Tested with Triton's interpreter (TRITON_INTERPRET=1) only. It has never run on a GPU, and no speed is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 128  # 64 ids of 8 bytes, the usual history, in one step
MAX_ATTEMPTS = 8  # two different rows share a 64-bit hash about once in 2**64 pairs; another seed then separates them


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def mix(word):  # type: ignore[no-untyped-def, unused-ignore]
    """The finaliser of splitmix64, on uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def hash_kernel(words, offsets, hashes, seed, words_per_item, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + row) * words_per_item
    length = tl.load(offsets + row + 1) * words_per_item - start
    total = tl.load(hashes + row).to(tl.uint64, bitcast=True) + mix((length + seed).to(tl.uint64))
    for at in range(0, length, BLOCK):
        position = at + tl.arange(0, BLOCK).to(tl.int64)
        mask = position < length
        word = tl.load(words + start + position, mask=mask, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        mixed = mix(word ^ mix((position + 1 + seed).to(tl.uint64)))
        total += tl.sum(tl.where(mask, mixed, 0))
    tl.store(hashes + row, mix(total).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def differ_kernel(words, offsets, order, differs, words_per_item, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """differs[i] += whether the rows order[i] and order[i + 1] differ in this feature."""
    i = tl.program_id(0).to(tl.int64)
    a, b = tl.load(order + i), tl.load(order + i + 1)
    start_a, start_b = tl.load(offsets + a) * words_per_item, tl.load(offsets + b) * words_per_item
    length = tl.load(offsets + a + 1) * words_per_item - start_a
    found = tl.where(tl.load(offsets + b + 1) * words_per_item - start_b != length, 1, 0)
    if found == 0:
        for at in range(0, length, BLOCK):
            position = at + tl.arange(0, BLOCK).to(tl.int64)
            mask = position < length
            word_a = tl.load(words + start_a + position, mask=mask, other=0)
            word_b = tl.load(words + start_b + position, mask=mask, other=0)
            found += tl.sum((word_a != word_b).to(tl.int32))
    tl.store(differs + i, tl.load(differs + i) + found)


def as_words(values: Tensor) -> tuple[Tensor, int]:
    """The values as integers of at most 4 bytes, and how many of them make one item."""
    word = {1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32)
    words = values.contiguous().reshape(-1).view(word)
    return words, words.numel() // max(len(values), 1)


# B = rows, U = distinct rows
def dedup_rows(values: Sequence[Tensor], offsets: Sequence[Tensor], *, hash_mask: int = -1) -> tuple[Tensor, Tensor]:
    num_rows, device = len(offsets[0]) - 1, values[0].device
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device)
    features = [(*as_words(own), start.contiguous()) for own, start in zip(values, offsets, strict=True)]
    for seed in range(MAX_ATTEMPTS):
        hashes_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        for words, words_per_item, start in features:
            hash_kernel[(num_rows,)](words, start, hashes_B, seed << 32, words_per_item, BLOCK=BLOCK)
        hashes_B &= hash_mask if seed == 0 else -1  # tests make the first hashes collide
        sorted_B, order_B = torch.sort(hashes_B, stable=True)
        is_new = torch.ones(num_rows, dtype=torch.bool, device=device)
        is_new[1:] = sorted_B[1:] != sorted_B[:-1]
        differs = torch.zeros(num_rows, dtype=torch.int32, device=device)
        if num_rows > 1:
            for words, words_per_item, start in features:
                differ_kernel[(num_rows - 1,)](words, start, order_B, differs[1:], words_per_item, BLOCK=BLOCK)
        if not bool(((differs > 0) & ~is_new).any()):
            return number_rows(order_B, is_new)
    raise RuntimeError(f"{MAX_ATTEMPTS} hashes with different seeds all collided")


def number_rows(order_B: Tensor, is_new: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows in order of first occurrence; `order_B` is stable, so each class starts with its first row."""
    unique_rows, by_occurrence = torch.sort(order_B[is_new])
    numbers_U = torch.empty_like(by_occurrence)
    numbers_U[by_occurrence] = torch.arange(len(unique_rows), device=order_B.device)
    inverse_B = torch.empty_like(order_B)
    inverse_B[order_B] = numbers_U[torch.cumsum(is_new, 0) - 1]
    return unique_rows, inverse_B
