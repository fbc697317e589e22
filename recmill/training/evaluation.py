"""Accuracy of predictions: AUC, log loss, normalised entropy, ROC curve. Exact, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# N = samples


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    auc: float | None  # None if all labels are equal
    log_loss: float
    normalised_entropy: float | None  # log loss against that of always predicting the base rate; below 1 is better
    base_rate: float
    num_samples: int


def measure_accuracy(logits_N: np.ndarray, labels_N: np.ndarray) -> Accuracy:
    """AUC (ties count half), mean log loss and normalised entropy of all samples."""
    logits = np.asarray(logits_N, dtype=np.float64)
    labels = np.asarray(labels_N, dtype=np.float64)
    base_rate = float(labels.mean())
    # log(1 + e^x) - y x, in the form that does not overflow
    losses = np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
    log_loss = float(losses.mean())
    has_both = 0 < base_rate < 1
    entropy = -(base_rate * np.log(base_rate) + (1 - base_rate) * np.log(1 - base_rate)) if has_both else 0.0
    return Accuracy(
        auc=area_under_curve(logits, labels) if has_both else None,
        log_loss=log_loss,
        normalised_entropy=float(log_loss / entropy) if has_both else None,
        base_rate=base_rate,
        num_samples=len(labels),
    )


def roc_points(scores_N: np.ndarray, labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(false positive rate, true positive rate, threshold) at every distinct score, from (0, 0) to (1, 1)."""
    order = np.argsort(-scores_N, kind="stable")
    scores, labels = scores_N[order], labels_N[order]
    is_last_of_ties = np.append(scores[1:] != scores[:-1], True)
    hits = np.cumsum(labels)[is_last_of_ties]
    misses = np.cumsum(1 - labels)[is_last_of_ties]
    fpr = np.concatenate([[0.0], misses / max(misses[-1], 1e-300)])
    tpr = np.concatenate([[0.0], hits / max(hits[-1], 1e-300)])
    return fpr, tpr, np.concatenate([[scores[0]], scores[is_last_of_ties]])


def area_under_curve(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """The probability that a positive scores above a negative, ties counting half."""
    fpr, tpr, _ = roc_points(scores_N, labels_N)
    return float(np.trapezoid(tpr, fpr))


def thin_curve(curve: tuple[np.ndarray, ...], num_points: int = 200) -> tuple[np.ndarray, ...]:
    """At most `num_points` points of a curve, evenly spaced by index, with both ends."""
    keep = np.unique(np.linspace(0, len(curve[0]) - 1, min(num_points, len(curve[0]))).round().astype(int))
    return tuple(axis[keep] for axis in curve)


def gather_on_rank_zero(values_N: Tensor) -> Tensor | None:
    """Every rank's values joined in rank order, on rank 0; None on the others. Ranks may hold different numbers."""
    world_size = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=values_N.device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([values_N.numel()], device=values_N.device))
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(values_N, (0, longest - values_N.numel()))
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0)
        return None
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.gather(padded, gathered, dst=0)
    return torch.cat([part[: int(size)] for part, size in zip(gathered, sizes, strict=True)])
