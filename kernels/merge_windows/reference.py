"""The definition of merging windows in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kernels.merge_windows import IdArray, WindowSource


def merge_windows(sources: Sequence[WindowSource]) -> tuple[IdArray, IdArray]:
    pieces, new_starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for values, starts, lengths in sources:
        is_covered = np.zeros(len(values), dtype=bool)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            is_covered[start : start + length] = True
        place = sum(map(len, pieces)) + np.cumsum(is_covered) - 1
        new_starts.append(np.where(lengths > 0, place[np.minimum(starts, len(values) - 1)], 0))
        pieces.append(values[is_covered])
    return np.concatenate(pieces), np.concatenate(new_starts)
