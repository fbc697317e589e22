"""How well the values of one column tell positives from negatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TELLING = 0.95  # AUC of one feature, from which it says the label
PRIOR = 10  # samples of average label that are added to each value
NUM_BINS = 64  # of a dense feature's values

Floats = npt.NDArray[np.float64]


def auc_of_groups(score: Floats, num: Floats, positive: Floats) -> float:
    """The AUC of a score that all samples of a group share: num samples, `positive` of them with label 1."""
    order = np.argsort(score, kind="stable")
    score, num, positive = score[order], num[order], positive[order]
    # Groups of equal score count half of their pairs.
    starts = np.flatnonzero(np.concatenate([[True], score[1:] != score[:-1]]))
    pos, neg = np.add.reduceat(positive, starts), np.add.reduceat(num - positive, starts)
    below = np.concatenate([[0.0], np.cumsum(neg)[:-1]])
    total = pos.sum() * neg.sum()
    return float((pos * (below + neg / 2)).sum() / total) if total else 0.5


def auc_of_values(value: npt.NDArray[Any], half: npt.NDArray[Any], num: Floats, positive: Floats) -> float:
    """The AUC on one half of the rates of the values in the other half: values seen once say nothing."""
    codes = np.unique(value, return_inverse=True)[1]
    sums = np.zeros((2, 2, int(codes.max()) + 1))
    np.add.at(sums[0], (half, codes), num)
    np.add.at(sums[1], (half, codes), positive)
    seen, hits = sums
    base = hits[0].sum() / max(1.0, seen[0].sum())
    return auc_of_groups((hits[0] + PRIOR * base) / (seen[0] + PRIOR), seen[1], hits[1])


def bins_of(value: npt.NDArray[Any], num: Floats) -> npt.NDArray[Any]:
    """Numbers in NUM_BINS bins of about equally many samples; equal numbers stay together."""
    distinct, codes = np.unique(value, return_inverse=True)
    if len(distinct) <= NUM_BINS:
        return codes
    per_value = np.bincount(codes, weights=num)
    bins: npt.NDArray[Any] = ((np.cumsum(per_value) - per_value) * NUM_BINS // per_value.sum()).astype(np.int64)[codes]
    return bins
