"""The definition of `split_tiers` and `distinct_keys` in torch; its `distinct_keys` is also used on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 64
TIER_BITS = 3


def split_tiers(
    ids_N: Tensor, bits: Tensor, ranks: Tensor, moved_M: Tensor, num_rows: int, common_tier: int
) -> tuple[Tensor, Tensor]:
    rows_N = ids_N.long()
    check_ids(ids_N, num_rows)
    shifts = torch.arange(WORD_BITS, device=bits.device)
    is_moved_R = ((bits[:, None] >> shifts) & 1).bool().reshape(-1)
    below_R = torch.cumsum(is_moved_R, 0) - is_moved_R.long()
    tiers_N = torch.full(ids_N.shape, common_tier, dtype=torch.uint8, device=ids_N.device)
    slots_N = rows_N - below_R[rows_N]
    at = is_moved_R[rows_N]
    entries = moved_M[below_R[rows_N[at]]]
    tiers_N[at] = (entries & ((1 << TIER_BITS) - 1)).to(torch.uint8)
    slots_N[at] = entries >> TIER_BITS
    return tiers_N, slots_N


def check_ids(ids_N: Tensor, num_rows: int) -> None:
    """Raise ValueError with the first id outside [0, num_rows)."""
    bad = (ids_N < 0) | (ids_N >= num_rows)
    if bad.any():
        position = int(bad.nonzero()[0])
        raise ValueError(f"ids[{position}] is {int(ids_N[position])}, expected a row in [0, {num_rows})")


def distinct_keys(keys_N: Tensor) -> tuple[Tensor, Tensor]:
    distinct_U, inverse_N = torch.unique(keys_N, sorted=True, return_inverse=True)
    return distinct_U, inverse_N
