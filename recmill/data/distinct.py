"""Decoded rows of a row group with each repeated list held once: what the reader hands to transforms and batches.

Shape suffixes: R = rows (samples) of the row group, U = distinct rows of a group, F = dense features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctGroup:
    """Features that share one inverse. Distinct row u of the f-th feature is

        values[f][starts[f][u] : starts[f][u] + lengths[f][u]]

    so lists may lie one after another or be overlapping windows of a history. `inverse_R` maps a sample to its
    distinct row; None means that every sample has its own (U = R).
    """

    keys: tuple[str, ...]
    values: tuple[IdArray, ...]
    starts: tuple[IdArray, ...]
    lengths: tuple[npt.NDArray[np.int32], ...]
    inverse_R: npt.NDArray[np.int32] | None = None

    @property
    def num_distinct(self) -> int:
        return len(self.lengths[0])

    def size_in_bytes(self) -> int:
        arrays = [*self.values, *self.starts, *self.lengths, *([] if self.inverse_R is None else [self.inverse_R])]
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctBlock:
    """All samples of a row group. The groups hold every id feature of the schema exactly once."""

    dense_RF: npt.NDArray[np.float32]
    label_R: npt.NDArray[np.float32]
    groups: tuple[DistinctGroup, ...]

    def __len__(self) -> int:
        return int(self.label_R.shape[0])

    def size_in_bytes(self) -> int:
        return self.dense_RF.nbytes + self.label_R.nbytes + sum(group.size_in_bytes() for group in self.groups)
