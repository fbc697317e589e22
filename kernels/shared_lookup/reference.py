"""Shared lookups in plain torch: the definition of correct. It builds the index tensor that the kernels avoid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.shared_lookup.layout import BLOCK_FACTOR, ID_FACTOR, MIX_FACTORS, signed

# N = ids of all lists, B = samples, F = features, D = width of a row, W = width of all features together


def shift_right(words: Tensor, bits: int) -> Tensor:
    """A logical shift of the 64 bits, which does not copy the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix_bits(words: Tensor) -> Tensor:
    words = (words ^ shift_right(words, 30)) * signed(MIX_FACTORS[0])
    words = (words ^ shift_right(words, 27)) * signed(MIX_FACTORS[1])
    return words ^ shift_right(words, 31)


def scale_hash(words: Tensor, limit: int) -> Tensor:
    """The upper 64 bits of words * limit (both unsigned), sixteen bits of the word at a time."""
    total = torch.zeros_like(words)
    for bits in (0, 16, 32, 48):
        total = (total + (shift_right(words, bits) if bits else words).bitwise_and(0xFFFF) * limit) >> 16
    return total


def find_slots(ids_N: Tensor, feature: Sequence[int], exact_ids: Tensor, layout: Sequence[int]) -> Tensor:
    """[N, D]: the slots of rows of one feature's table."""
    size, block = layout
    key, dim, _, _, exact_start, num_exact, exact_base, exact_width = feature
    column_D = torch.arange(dim, device=ids_N.device)
    own_N1 = key + ids_N.long()[:, None] * signed(ID_FACTOR)
    hash_ND = mix_bits(own_N1 + (column_D // block) * signed(BLOCK_FACTOR))
    slots_ND = scale_hash(hash_ND, size - block + 1) + column_D % block
    if num_exact:
        kept = exact_ids[exact_start : exact_start + num_exact]
        rank_N = torch.searchsorted(kept, ids_N.long()).clamp(max=num_exact - 1)
        exact_ND = exact_base + rank_N[:, None] * exact_width + column_D % exact_width
        slots_ND = torch.where((kept[rank_N] == ids_N)[:, None], exact_ND, slots_ND)
    return slots_ND


def shared_lookup(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    width: int,
    is_pooled: bool,
) -> Tensor:
    """[B, W] pooled, or the rows [N, D] of the ids one by one; torch derives the gradients."""
    num_samples = (len(offsets) - 1) // len(features)
    outputs = []
    for f, feature in enumerate(features.tolist()):
        bounds = offsets[f * num_samples : (f + 1) * num_samples + 1]
        rows_ND = array[find_slots(ids_N[int(bounds[0]) : int(bounds[-1])], feature, exact_ids, layout)]
        if is_pooled:
            lengths = bounds.diff()
            owners = torch.repeat_interleave(torch.arange(num_samples, device=offsets.device), lengths)
            total = rows_ND.new_zeros(num_samples, rows_ND.shape[1]).index_add(0, owners, rows_ND)
            rows_ND = total / lengths.clamp(min=1)[:, None] if feature[2] else total
        outputs.append(rows_ND)
    return torch.cat(outputs, dim=1 if is_pooled else 0)


def adagrad(
    array: Tensor, momentum: Tensor, gradient: Tensor, *, group: int, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    """(array, momentum) after a step. `group` slots share a momentum, which adds the mean of their squares."""
    squares = gradient.square()
    if group == 1:
        momentum = momentum + squares
        return array - lr * gradient / (momentum.sqrt() + eps), momentum
    group_of = torch.arange(len(array), device=array.device) // group
    counts = torch.bincount(group_of, minlength=len(momentum))
    momentum = momentum + torch.zeros_like(momentum).index_add(0, group_of, squares) / counts
    return array - (lr / (momentum.sqrt() + eps))[group_of] * gradient, momentum
