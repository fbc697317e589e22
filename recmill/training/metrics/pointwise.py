"""Metrics over all samples: AUC, log loss, normalised entropy, ROC curve.

Shape suffixes: N = samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    auc: float | None  # None if all labels are equal
    log_loss: float
    normalised_entropy: float | None  # log loss against that of always predicting the base rate; below 1 is better
    base_rate: float
    num_samples: int


def measure_accuracy(logits_N: npt.ArrayLike, labels_N: npt.ArrayLike) -> Accuracy:
    """AUC (ties count half), mean log loss and normalised entropy of all samples."""
    logits = np.asarray(logits_N, dtype=np.float64)
    labels = np.asarray(labels_N, dtype=np.float64)
    base_rate = float(labels.mean())
    log_loss = float(sample_losses(logits, labels).mean())
    has_both = 0 < base_rate < 1
    return Accuracy(
        auc=area_under_curve(logits, labels) if has_both else None,
        log_loss=log_loss,
        normalised_entropy=log_loss / entropy(base_rate) if has_both else None,
        base_rate=base_rate,
        num_samples=len(labels),
    )


def sample_losses(logits_N: FloatArray, labels_N: FloatArray) -> FloatArray:
    """The log loss of every sample: log(1 + e^x) - y x, in the form that does not overflow."""
    losses: FloatArray = np.maximum(logits_N, 0) - logits_N * labels_N + np.log1p(np.exp(-np.abs(logits_N)))
    return losses


def logit(probability_N: npt.ArrayLike) -> FloatArray:
    """The inverse of `probabilities`; 0 and 1 count as the nearest float32 beside them."""
    inside = np.clip(np.asarray(probability_N, dtype=np.float64), 1e-37, 1 - 6e-8)
    found: FloatArray = np.log(inside) - np.log1p(-inside)
    return found


def probabilities(logits_N: FloatArray) -> FloatArray:
    """The logistic function, in the form that does not overflow."""
    small = np.exp(-np.abs(logits_N))
    return np.where(logits_N >= 0, 1.0, small) / (1.0 + small)


def entropy(base_rate: float) -> float:
    """The log loss of always predicting the base rate."""
    return float(-(base_rate * np.log(base_rate) + (1 - base_rate) * np.log(1 - base_rate)))


def roc_points(scores_N: np.ndarray, labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(false positive rate, true positive rate, threshold) at every distinct score, from (0, 0) to (1, 1).

    The rate of a class that has no sample is 0.
    """
    order = np.argsort(-scores_N, kind="stable")
    scores, labels = scores_N[order], labels_N[order]
    is_last_of_ties = np.append(scores[1:] != scores[:-1], True)
    hits = np.cumsum(labels)[is_last_of_ties]
    misses = np.cumsum(1 - labels)[is_last_of_ties]
    fpr = np.concatenate([[0.0], misses / (misses[-1] or 1)])
    tpr = np.concatenate([[0.0], hits / (hits[-1] or 1)])
    return fpr, tpr, np.concatenate([[scores[0]], scores[is_last_of_ties]])


def area_under_curve(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """The probability that a positive scores above a negative, ties counting half."""
    fpr, tpr, _ = roc_points(scores_N, labels_N)
    return float(np.trapezoid(tpr, fpr))


def thin_curve(curve: tuple[np.ndarray, ...], num_points: int = 200) -> tuple[np.ndarray, ...]:
    """At most `num_points` points of a curve, evenly spaced by index, with both ends."""
    keep = np.unique(np.linspace(0, len(curve[0]) - 1, min(num_points, len(curve[0]))).round().astype(int))
    return tuple(axis[keep] for axis in curve)
