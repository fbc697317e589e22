"""Everything that is measured on held-out predictions, as result.json stores it.

Shape suffixes: N = samples, T = tasks (labels), S = sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.training.metrics.bootstrap import (
    MAX_SAMPLES,
    NUM_RESAMPLES,
    Weights,
    resampled_areas,
    resampled_sums,
    session_weights,
    spread,
    sum_by_session,
)
from recmill.training.metrics.calibration import ReliabilityBin, bin_starts, calibration_error, reliability
from recmill.training.metrics.lists import RankedLists
from recmill.training.metrics.pointwise import measure_accuracy, probabilities, sample_losses
from recmill.training.metrics.slices import SliceAccuracy, cut_slices

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
CUTOFFS = (5, 10)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Predictions of one label for held-out samples, with what groups and slices are made from.

    `user_N` is None if the data names no user; `counts` maps a feature to how often training saw each sample's id.
    """

    logits_N: npt.NDArray[np.floating]
    labels_N: npt.NDArray[np.floating]
    session_N: IntArray
    user_N: IntArray | None = None
    counts: Mapping[str, IntArray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """All metrics of one label. `values` and `standard_errors` have the same names, in the order of a table."""

    values: Mapping[str, float | int | None]
    standard_errors: Mapping[str, float | None]
    groups: Mapping[str, Any]  # what a group of the GAUC is, and how many there are
    slices: Sequence[SliceAccuracy]
    reliability: Sequence[ReliabilityBin]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.values,
            "standard_errors": dict(self.standard_errors),
            "groups": dict(self.groups),
            "slices": [asdict(entry) for entry in self.slices],
            "reliability": [asdict(entry) for entry in self.reliability],
        }


def measure_quality(
    held_out: HeldOut, *, cutoffs: Sequence[int] = CUTOFFS, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Quality:
    """Every metric with its standard error, the slices and the reliability of the predictions."""
    logits = np.asarray(held_out.logits_N, np.float64)
    labels = np.asarray(held_out.labels_N, np.float64)
    session = number_groups(held_out.session_N)
    user = session if held_out.user_N is None else number_groups(held_out.user_N)
    order = np.argsort(logits, kind="stable")
    bins = bin_starts(logits[order])
    curve = reliability(probabilities(logits[order]), labels[order], bins)
    lists = RankedLists.of(logits, labels, session)
    per_user = lists if user is session else RankedLists.of(logits, labels, user)
    accuracy = asdict(measure_accuracy(logits, labels))
    auc_G, per_session = per_user.auc(), _list_metrics(lists, cutoffs)
    values: dict[str, float | int | None] = {
        **accuracy,
        "gauc": _mean(auc_G, per_user.size_G),
        "calibration": float(probabilities(logits).sum() / labels.sum()) if labels.any() else None,
        "ece": calibration_error(curve),
        **{name: _mean(of_S) for name, of_S in per_session.items()},
    }
    resamples = _Resamples(session, num_resamples=num_resamples, seed=seed)
    errors = resamples.accuracy_errors(logits, labels, order, has_bins=True)
    errors |= {name: resamples.session_error(of_S) for name, of_S in per_session.items()}
    group_error = resamples.session_error if user is session else resamples.user_error
    errors["gauc"] = group_error(auc_G, per_user.size_G.astype(np.float64))
    return Quality(
        values=values,
        standard_errors={name: errors[name] for name in values if name in errors},
        groups={
            "kind": "session" if user is session else "user",
            "num_groups": len(per_user),
            "num_one_class": int(np.isnan(auc_G).sum()),
            "num_sessions": len(lists),
            "num_without_positive": int((~lists.has_positive_G).sum()),
        },
        slices=[
            SliceAccuracy(
                **asdict(entry),
                **_pick(measure_accuracy(logits[chosen_N], labels[chosen_N])),
                standard_errors=resamples.accuracy_errors(logits, labels, order[chosen_N[order]]),
            )
            for entry, chosen_N in cut_slices(held_out.counts)
        ],
        reliability=curve,
    )


def number_groups(ids_N: npt.ArrayLike) -> IntArray:
    """The groups numbered from 0 in order of their ids."""
    ids = np.asarray(ids_N)
    if (ids[1:] >= ids[:-1]).all():  # stored by session: no need to sort
        numbers: IntArray = np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)
        return numbers
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _list_metrics(lists: RankedLists, cutoffs: Sequence[int]) -> dict[str, FloatArray]:
    found = {"mrr": lists.reciprocal_rank()}
    for k in cutoffs:
        found |= {
            f"ndcg_at_{k}": lists.ndcg(k),
            f"recall_at_{k}": lists.recall(k),
            f"hit_rate_at_{k}": lists.hit_rate(k),
        }
    return found


def _mean(values_S: FloatArray, sizes_S: npt.NDArray[np.generic] | None = None) -> float | None:
    is_known_S = np.isfinite(values_S)
    if not is_known_S.any():
        return None
    sizes = None if sizes_S is None else np.asarray(sizes_S, np.float64)[is_known_S]
    return float(np.average(values_S[is_known_S], weights=sizes))


def _pick(accuracy: Any) -> dict[str, Any]:
    return {name: getattr(accuracy, name) for name in ("num_samples", "base_rate", "auc", "log_loss")}


class _Resamples:
    """The same resamples for every metric; of very many samples, only those of sessions drawn at random."""

    def __init__(self, session_N: IntArray, *, num_resamples: int, seed: int) -> None:
        self.seed, self.num_resamples = seed, num_resamples
        self.share = min(1.0, MAX_SAMPLES / len(session_N))
        self.kept_S = self._keep(int(session_N.max()) + 1, self.share)
        self.number_N = (np.cumsum(self.kept_S) - 1)[session_N]  # of the session among those kept
        self.is_kept_N = self.kept_S[session_N]
        self.weights = self._weights(int(self.kept_S.sum()))

    def _keep(self, count: int, share: float) -> npt.NDArray[np.bool_]:
        return np.ones(count, bool) if share == 1 else np.random.default_rng([self.seed, 1]).random(count) < share

    def _weights(self, count: int) -> list[npt.NDArray[np.uint8]]:
        return list(session_weights(count, seed=self.seed, num_resamples=self.num_resamples))

    def accuracy_errors(
        self, logits_N: FloatArray, labels_N: FloatArray, order_N: IntArray, *, has_bins: bool = False
    ) -> dict[str, float | None]:
        """The errors of AUC and log loss over the samples `order_N`, sorted by score; with bins, of calibration too."""
        order_N = order_N[self.is_kept_N[order_N]]
        logits, labels, session = logits_N[order_N], labels_N[order_N], self.number_N[order_N]
        predicted = probabilities(logits)
        columns = [sample_losses(logits, labels), labels, predicted]
        starts = bin_starts(logits) if has_bins else np.zeros(0, int)
        gaps_N, bins_N = predicted - labels, np.searchsorted(starts, np.arange(len(logits)), side="right") - 1
        columns += [np.where(bins_N == number, gaps_N, 0.0) for number in range(len(starts))]
        sums = resampled_sums(self.weights, sum_by_session(session, int(self.kept_S.sum()), *columns))
        with np.errstate(invalid="ignore", divide="ignore"):
            totals, losses, hits, predicted_sums = sums[:, :4].T
            rates, log_losses = hits / totals, losses / totals
            found = {"auc": resampled_areas(logits, labels, session, self.weights), "log_loss": log_losses}
            if has_bins:
                entropies = -(rates * np.log(rates) + (1 - rates) * np.log(1 - rates))
                found |= {"normalised_entropy": log_losses / entropies, "base_rate": rates}
                found |= {"calibration": predicted_sums / hits, "ece": np.abs(sums[:, 4:]).sum(axis=1) / totals}
        return {name: spread(values, share=self.share) for name, values in found.items()}

    def session_error(self, of_S: FloatArray, size_S: FloatArray | None = None) -> float | None:
        """The error of a mean over sessions, weighted by their sizes if these are given."""
        sizes = None if size_S is None else size_S[self.kept_S]
        return _mean_error(of_S[self.kept_S], self.weights, sizes, share=self.share)

    def user_error(self, auc_G: FloatArray, size_G: FloatArray) -> float | None:
        """The error of the GAUC over users, who are resampled as a whole: their sessions are alike."""
        share = min(1.0, MAX_SAMPLES / len(auc_G))
        kept_G = self._keep(len(auc_G), share)
        return _mean_error(auc_G[kept_G], self._weights(int(kept_G.sum())), size_G[kept_G], share=share)


def _mean_error(
    values_S: FloatArray, weights: Sequence[Weights], sizes_S: FloatArray | None = None, *, share: float
) -> float | None:
    """The standard error of the mean of one value per session, weighted by `sizes_S`; NaN values do not count."""
    sizes = np.isfinite(values_S) * (1.0 if sizes_S is None else sizes_S)
    sums = resampled_sums(weights, np.stack([np.nan_to_num(values_S) * sizes, sizes], axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return spread(sums[:, 0] / sums[:, 1], share=share)
