"""Shared lookups in plain torch: the definition of correct. It builds the index tensor that the kernels avoid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.shared_lookup.layout import BLOCK_FACTOR, FLAT_IDS, ID_FACTOR, MIX_FACTORS, signed

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


def find_slots(
    ids_N: Tensor, feature: Sequence[int], exact_ids: Tensor, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(slots [N, D], signs [N, D]) of rows of one feature's table."""
    size, seed_key, block, is_fold, is_signed = layout
    key, base, dim, _, _, exact_start, num_exact, exact_base, exact_width = feature
    column_D = torch.arange(dim, device=ids_N.device)
    ids_N1 = ids_N.long()[:, None]
    own_N1 = key + ids_N1 * signed(ID_FACTOR)
    if is_fold:
        is_flat_N1 = (ids_N1 >= 0) & (ids_N1 < FLAT_IDS)
        flat_ND = torch.where(is_flat_N1, base + ids_N1 * dim, 0) + column_D
        piece_ND = flat_ND // size
        hash_ND = mix_bits(seed_key + torch.where(is_flat_N1, 0, own_N1) + piece_ND * signed(BLOCK_FACTOR))
        turn_ND = scale_hash(hash_ND, max(1, size // block)) * block
        slots_ND = (flat_ND % size + turn_ND) % size
    else:
        hash_ND = mix_bits(own_N1 + (column_D // block) * signed(BLOCK_FACTOR))
        slots_ND = scale_hash(hash_ND, size - block + 1) + column_D % block
    signs_ND = 1 - 2 * (hash_ND & 1) * is_signed
    if num_exact:
        kept = exact_ids[exact_start : exact_start + num_exact]
        rank_N = torch.searchsorted(kept, ids_N.long()).clamp(max=num_exact - 1)
        is_exact_N1 = (kept[rank_N] == ids_N)[:, None]
        exact_ND = exact_base + rank_N[:, None] * exact_width + column_D % exact_width
        slots_ND = torch.where(is_exact_N1, exact_ND, slots_ND)
        signs_ND = torch.where(is_exact_N1, 1, signs_ND)
    return slots_ND, signs_ND


def pool_lists(rows_ND: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int) -> Tensor:
    """Sum, mean or max of every list; zeros for an empty one."""
    lengths = offsets.diff()
    if mode == 2:
        zeros = 0 * rows_ND.sum(0)  # in the graph even if all lists are empty
        ends = offsets.tolist()
        lists = [rows_ND[a:b].max(0).values if b > a else zeros for a, b in pairwise(ends)]
        return torch.stack(lists) if lists else rows_ND.new_zeros(0, rows_ND.shape[1])
    if weights_N is not None:
        rows_ND = rows_ND * weights_N[:, None]
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    total = rows_ND.new_zeros(len(lengths), rows_ND.shape[1]).index_add(0, owners, rows_ND)
    return total / lengths.clamp(min=1)[:, None] if mode == 1 else total


def shared_lookup(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: Sequence[int],
    is_pooled: bool,
) -> Tensor:
    """[B, W] pooled, or the rows [N, D] of the ids one by one; torch derives the gradients."""
    num_samples = (len(offsets) - 1) // len(features)
    outputs = []
    for f, feature in enumerate(features.tolist()):
        bounds = offsets[f * num_samples : (f + 1) * num_samples + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        slots_ND, signs_ND = find_slots(ids_N[first:last], feature, exact_ids, layout)
        rows_ND = array[slots_ND] * signs_ND.to(array.dtype)
        weights = None if weights_N is None else weights_N[first:last]
        if is_pooled:
            outputs.append(pool_lists(rows_ND, bounds - first, weights, feature[3]))
        else:
            outputs.append(rows_ND if weights is None else rows_ND * weights[:, None])
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
