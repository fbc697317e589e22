"""Which row groups of a dataset a profile reads, and how far a sampled share may be off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recmill.artifacts import Dataset
from recmill.data.dataset import select_parts

# A row group of a dataset: the file of its part, its number in it, its rows.
Group = tuple[str, int, int]

SAMPLE_SEED = 0


def row_groups(dataset: Dataset, split: str | None) -> list[Group]:
    """Every row group of a split in stored order."""
    parts = select_parts(dataset, split)
    return [(part.file, number, rows) for part in parts for number, rows in enumerate(part.row_group_rows)]


def sample_groups(groups: Sequence[Group], sample: float) -> list[Group]:
    """A seeded random choice of row groups holding about `sample` of the rows, at least two, in random order."""
    wanted_rows = sample * sum(rows for _, _, rows in groups)
    order = np.random.default_rng(SAMPLE_SEED).permutation(len(groups))
    chosen: list[Group] = []
    for position in order.tolist():
        if len(chosen) >= 2 and sum(rows for _, _, rows in chosen) >= wanted_rows:
            break
        chosen.append(groups[position])
    return chosen


def by_file(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Row-group numbers per file, in stored order, as `read_rows` takes them."""
    numbers: dict[str, list[int]] = {}
    for file, number, _ in sorted(groups):
        numbers.setdefault(file, []).append(number)
    return numbers


def ratio_half_width(hits: np.ndarray, totals: np.ndarray, confidence: float) -> float | None:
    """Half-width of the interval around sum(hits) / sum(totals) when whole row groups were drawn; None below 2 groups.

    The variance is taken between row groups, because rows of a group resemble each other (Cochran, ratio estimator).
    """
    from scipy.special import stdtrit  # 0.3 s; only samples need it

    num_groups = len(totals)
    if num_groups < 2 or totals.sum() == 0:
        return None
    residuals = hits - totals * (hits.sum() / totals.sum())
    variance = float((residuals**2).sum()) / (num_groups - 1) / num_groups / float(totals.mean()) ** 2
    return float(stdtrit(num_groups - 1, (1 + confidence) / 2) * np.sqrt(variance))
