"""Predicted probabilities against observed rates.

Shape suffixes: N = samples in order of their score, K = bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
NUM_BINS = 20


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    predicted: float  # mean prediction
    observed: float  # mean label
    num_samples: int


def bin_starts(scores_N: FloatArray, num_bins: int = NUM_BINS) -> npt.NDArray[np.int64]:
    """Where bins of equal mass begin in sorted scores. Equal scores share a bin, so ties make bins fewer or uneven."""
    wanted = np.arange(num_bins) * len(scores_N) // num_bins
    first_of_ties = np.searchsorted(scores_N, scores_N[wanted], side="left")
    return np.unique(first_of_ties)


def reliability(predicted_N: FloatArray, labels_N: FloatArray, starts_K: npt.NDArray[np.int64]) -> list[ReliabilityBin]:
    """Mean prediction and mean label of each bin; bin k holds the sorted samples from starts_K[k] on."""
    counts_K = np.diff(np.append(starts_K, len(predicted_N)))
    predicted_K = np.add.reduceat(predicted_N, starts_K) / counts_K
    observed_K = np.add.reduceat(labels_N, starts_K) / counts_K
    return [
        ReliabilityBin(predicted=float(predicted), observed=float(observed), num_samples=int(count))
        for predicted, observed, count in zip(predicted_K, observed_K, counts_K, strict=True)
    ]


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """ECE: the mean distance between predicted and observed, over samples."""
    total = sum(entry.num_samples for entry in bins)
    return sum(entry.num_samples * abs(entry.predicted - entry.observed) for entry in bins) / total
