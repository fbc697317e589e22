"""The definition of `stack_columns` in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def stack_columns(
    columns: Sequence[npt.NDArray[np.float32]], num_rows: int
) -> tuple[npt.NDArray[np.float32], int | None]:
    stacked = np.empty((num_rows, len(columns)), np.float32)
    for position, column in enumerate(columns):
        stacked[:, position] = column
    wrong = np.flatnonzero(~np.isfinite(stacked).all(axis=0))
    return stacked, int(wrong[0]) if len(wrong) else None
