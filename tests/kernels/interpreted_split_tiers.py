"""Triton's split_tiers against rows found by hand; test_triton.py runs this file."""

import torch

from kernels import split_tiers
from tests.kernels.test_split_tiers import COMMON, expected, make_map


def test_it_finds_tier_and_slot_of_every_row():
    moved = [0, 5, 63, 64, 127, 129]
    bits, ranks, entries = make_map(130, moved)
    for ids in (torch.arange(130), torch.arange(0)):
        found = split_tiers(ids, bits, ranks, entries, num_rows=130, common_tier=COMMON, kernel="triton")
        assert (found[0].tolist(), found[1].tolist()) == expected(ids.tolist(), moved)
