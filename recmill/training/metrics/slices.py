"""AUC and log loss of samples with new, rare and frequent ids, by how often training saw them.

An id is new if the training split never holds it. The others are cut at the median over held-out samples of how often
training saw the sample's id: about half of the samples have a rare id, half a frequent one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class SliceRange:
    """The samples whose id of `feature` training saw from `low` up to, not including, `high` times."""

    feature: str
    kind: str
    low: int
    high: int | None  # None: no upper end


@dataclass(frozen=True, kw_only=True)
class SliceAccuracy(SliceRange):
    num_samples: int
    base_rate: float
    auc: float | None
    log_loss: float
    standard_errors: Mapping[str, float | None] = field(default_factory=dict)


def cut_slices(counts: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[tuple[SliceRange, npt.NDArray[np.bool_]]]:
    """Each slice that has samples, with its mask. `counts` maps a feature to its id's training count per sample.

    A negative count means that the sample has no id: it is in no slice.
    """
    for feature, counts_N in counts.items():
        known = counts_N[counts_N > 0]
        middle = int(np.median(known)) if len(known) else 1
        edges = {"new": (0, 1), "rare": (1, max(middle, 1)), "frequent": (max(middle, 1), None)}
        for kind, (low, high) in edges.items():
            chosen_N = counts_N >= low if high is None else (counts_N >= low) & (counts_N < high)
            if chosen_N.any():
                yield SliceRange(feature=feature, kind=kind, low=low, high=high), chosen_N
