"""The model from which the labels of synthetic logs are drawn, and how well they can be predicted.

    logit = bias + sum over lists of the effects of their ids      (linear: any model learns it)
                 + weights * dense values
                 + taste(user list) * trait(item)                  (an interaction: what DLRM's dot products are for)
                 + taste(history)   * trait(item)

Every term is scaled to a fixed share of the variance, so the best reachable AUC hardly depends on the preset.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, xlogy

from recmill.data.sources.lists import IntArray
from recmill.data.sources.synthetic.draws import ZipfSampler

Logits = npt.NDArray[np.float32]

# Share of the logit's variance that each kind of term explains. Items and dense values change with every sample and
# have the largest shares; a model that ignores users or interactions still scores visibly lower.
VARIANCE_SHARES = {"item": 0.35, "user_list": 0.2, "dense": 0.25, "interaction": 0.2}


def draw_effects(sampler: ZipfSampler, *, popular_rows: int, seed: int) -> npt.NDArray[np.float32]:
    """One effect for every id, with mean 0 and variance 1 over the *accesses* of the table.

    Effects are Gaussian and fade like K / (K + rank) beyond the K = `popular_rows` most popular ids: ids that are seen
    a few times cannot be learnt in an epoch and would only lower the reachable AUC.
    """
    rank = np.arange(sampler.num_rows)
    effects = np.random.default_rng(seed).standard_normal(sampler.num_rows) * popular_rows / (popular_rows + rank)
    effects -= sampler.probability_by_rank @ effects
    deviation = np.sqrt(sampler.probability_by_rank @ effects**2)
    if deviation > 0:
        effects /= deviation
    return sampler.values_by_id(effects.astype(np.float32))


def sum_windows(effects: npt.NDArray[np.float32], ids: IntArray, starts: IntArray, lengths: IntArray) -> Logits:
    """The sum of the effects of ids[start : start + length] for every window."""
    running = np.zeros(len(ids) + 1, dtype=np.float64)
    np.cumsum(effects.take(ids), out=running[1:])
    sums: Logits = (running[starts + lengths] - running[starts]).astype(np.float32)
    return sums


def solve_bias(*, base_rate: float, logit_std: float) -> float:
    """The bias with which normally distributed logits produce a mean label of `base_rate`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()
    bias: float = brentq(lambda bias: float(weights @ expit(bias + logit_std * nodes)) - base_rate, -50, 50)
    return bias


class HiddenModel:
    """Weights of every term; `user_terms`, `item_terms` name features, `pairs` are (user list or history, item)."""

    def __init__(
        self,
        *,
        samplers: Mapping[str, ZipfSampler],  # by id feature; a history has its item's
        item_terms: list[str],
        user_terms: list[str],
        dense_terms: list[str],
        pairs: list[tuple[str, str]],
        base_rate: float,
        logit_std: float,
        popular_rows: int,
        seed: int,
        number: int = 0,  # of the label; models of different labels are drawn independently
    ) -> None:
        sequence = np.random.SeedSequence([seed, 1, number] if number else [seed, 1])
        seeds = sequence.generate_state(2 * len(samplers) + 1)
        shares = {
            "item": len(item_terms),
            "user_list": len(user_terms),
            "dense": len(dense_terms),
            "interaction": len(pairs),
        }
        total = sum(VARIANCE_SHARES[kind] for kind, count in shares.items() if count)
        self.scale = {
            kind: logit_std * float(np.sqrt(VARIANCE_SHARES[kind] / total / count))
            for kind, count in shares.items()
            if count
        }
        self.effects: dict[str, npt.NDArray[np.float32]] = {}
        self.tastes: dict[str, npt.NDArray[np.float32]] = {}
        for number, (name, sampler) in enumerate(samplers.items()):
            self.effects[name] = draw_effects(sampler, popular_rows=popular_rows, seed=int(seeds[2 * number]))
            self.tastes[name] = draw_effects(sampler, popular_rows=popular_rows, seed=int(seeds[2 * number + 1]))
        # Signs only: dense values are standard normal, so each explains the same share.
        signs = np.random.default_rng(int(seeds[-1])).choice([-1.0, 1.0], size=len(dense_terms))
        self.dense_signs = dict(zip(dense_terms, signs.tolist(), strict=True))
        self.pairs = pairs
        self.bias = solve_bias(base_rate=base_rate, logit_std=logit_std)


class BestScores:
    """AUC and log loss of a predictor that knows the true probabilities: no model scores higher, except by chance.

    AUC is computed from the drawn labels over logits in bins of 1/512, exact to about 1e-6; log loss is the expected
    one. Both take little memory for any number of samples.
    """

    LIMIT = 20.0
    BINS_PER_UNIT = 512

    def __init__(self) -> None:
        num_bins = int(2 * self.LIMIT * self.BINS_PER_UNIT) + 1
        self.counts = np.zeros((2, num_bins), dtype=np.int64)  # labels 0 and 1
        self.total_entropy = 0.0

    def add(self, logits: Logits, labels: npt.NDArray[np.float32]) -> None:
        bins = ((np.clip(logits, -self.LIMIT, self.LIMIT) + self.LIMIT) * self.BINS_PER_UNIT).astype(np.int64)
        num_bins = self.counts.shape[1]
        flat = np.bincount(bins + num_bins * (labels > 0.5), minlength=2 * num_bins)
        self.counts += flat.reshape(2, num_bins)
        probability = expit(logits.astype(np.float64))
        self.total_entropy -= float(np.sum(xlogy(probability, probability) + xlogy(1 - probability, 1 - probability)))

    @property
    def auc(self) -> float | None:
        """None if only one label was drawn, since AUC is then undefined."""
        negatives, positives = self.counts
        num_pairs = int(negatives.sum()) * int(positives.sum())
        if num_pairs == 0:
            return None
        below = np.cumsum(negatives) - negatives
        return float(positives @ (below + negatives / 2) / num_pairs)

    @property
    def base_rate(self) -> float:
        return float(self.counts[1].sum() / self.counts.sum())

    @property
    def log_loss(self) -> float:
        return self.total_entropy / int(self.counts.sum())
