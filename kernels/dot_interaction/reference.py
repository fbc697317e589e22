"""The definition of the products in torch: all of them, then one of each pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dot_interaction(vectors: Sequence[Tensor], *, num_kept: int) -> Tensor:
    stacked_BFD = torch.stack(tuple(vectors), dim=1)
    products_BFF = torch.bmm(stacked_BFD, stacked_BFD.transpose(1, 2))
    first_P, second_P = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=stacked_BFD.device)
    pairs_BP = products_BFF.flatten(1).index_select(1, first_P * len(vectors) + second_P)
    return torch.cat([stacked_BFD[:, :num_kept].flatten(1), pairs_BP], dim=1)
