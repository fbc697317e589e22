"""The definition of `dedup_rows`: a dictionary from the bytes of a row to its number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dedup_rows(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    number_of: dict[tuple[bytes, ...], int] = {}
    unique_rows: list[int] = []
    inverse: list[int] = []
    for row in range(len(offsets[0]) - 1):
        lists = [own[start[row] : start[row + 1]].contiguous() for own, start in zip(values, offsets, strict=True)]
        content = tuple(own.view(torch.uint8).cpu().numpy().tobytes() for own in lists)
        if content not in number_of:
            number_of[content] = len(unique_rows)
            unique_rows.append(row)
        inverse.append(number_of[content])
    device = values[0].device
    return torch.tensor(unique_rows, dtype=torch.int64, device=device), torch.tensor(
        inverse, dtype=torch.int64, device=device
    )
