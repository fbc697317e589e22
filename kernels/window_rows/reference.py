"""The definition of the windows: try every shift of a list along the previous one, smallest first."""

from __future__ import annotations

import torch
from torch import Tensor


def find_windows(columns: list[Tensor], offsets: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Where each row's window starts in the buffer, and how many of its last values it adds to the buffer."""
    num_rows = len(offsets) - 1
    bits = [column.view(torch.uint8).reshape(len(column), column.element_size()).tolist() for column in columns]
    elements = list(zip(*bits, strict=True))
    buffer_size = 0
    last: list[tuple[list[int], ...]] = []
    starts, added = [0] * num_rows, [0] * num_rows
    for row in reversed(range(num_rows)) if reverse else range(num_rows):
        own = elements[int(offsets[row]) : int(offsets[row + 1])]
        starts[row] = buffer_size - len(last) + find_shift(last, own)
        added[row] = max(0, starts[row] + len(own) - buffer_size)
        buffer_size += added[row]
        if own and starts[row] + len(own) == buffer_size:
            last = own
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(added, dtype=torch.int64)


def find_shift(last: list[tuple[list[int], ...]], own: list[tuple[list[int], ...]]) -> int:
    if not own:
        return len(last)
    for shift in range(len(last)):
        overlap = min(len(last) - shift, len(own))
        if last[shift : shift + overlap] == own[:overlap]:
            return shift
    return len(last)
