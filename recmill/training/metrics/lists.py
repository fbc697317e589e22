"""Metrics of ranked lists: AUC, NDCG@k, recall@k, hit rate@k and reciprocal rank of every group of samples.

A group is one list: the samples of a session or of a user, by falling score. Equal scores have no order, so every
metric is its expected value over all orders of the tied samples; a tied pair counts half in the AUC.

    scores   5    3    3    1          NDCG@2 = (0 + mean(1, 0) / log2(3)) / ideal        a tied sample is second
    labels   0    1    0    1          recall@2 = mean(1, 0) / 2                          in half of the orders

Gains are the labels themselves (linear, as in scikit-learn). For hit rate and reciprocal rank a label of 0.5 or more is
positive.

Shape suffixes: N = samples, G = groups, B = runs of samples with the same group and score.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedLists:
    """Samples sorted by group and falling score, with equal scores joined. A metric is NaN where it is undefined."""

    first_block_G: IntArray  # the first run of each group
    block_group_B: IntArray
    position_B: IntArray  # samples of the group that score higher
    size_B: IntArray
    gain_B: FloatArray  # sum of the labels
    num_positive_B: IntArray
    size_G: IntArray
    sorted_labels_N: FloatArray  # by group and falling label; empty if all labels are 0 or 1

    @classmethod
    def of(cls, scores_N: npt.ArrayLike, labels_N: npt.ArrayLike, group_N: npt.ArrayLike) -> RankedLists:
        """From at least one sample; `group_N` numbers the groups from 0 without gaps."""
        scores = np.asarray(scores_N, np.float64)
        labels, group = np.asarray(labels_N, np.float64), np.asarray(group_N, np.int64)
        order = np.lexsort((-scores, group))
        scores, ranked, sorted_group = scores[order], labels[order], group[order]
        is_new_group = np.ones(len(scores), bool)
        is_new_group[1:] = sorted_group[1:] != sorted_group[:-1]
        is_new_block = is_new_group.copy()
        is_new_block[1:] |= scores[1:] != scores[:-1]
        starts_B, starts_G = np.flatnonzero(is_new_block), np.flatnonzero(is_new_group)
        block_group_B = sorted_group[starts_B]
        is_binary = bool(((labels == 0) | (labels == 1)).all())
        return cls(
            first_block_G=np.flatnonzero(is_new_group[starts_B]),
            block_group_B=block_group_B,
            position_B=starts_B - starts_G[block_group_B],
            size_B=np.diff(np.append(starts_B, len(scores))),
            gain_B=np.add.reduceat(ranked, starts_B),
            num_positive_B=np.add.reduceat(ranked >= 0.5, starts_B, dtype=np.int64),
            size_G=np.diff(np.append(starts_G, len(scores))),
            sorted_labels_N=np.empty(0) if is_binary else labels[np.lexsort((-labels, group))],
        )

    def __len__(self) -> int:
        return len(self.size_G)

    @cached_property
    def gain_G(self) -> FloatArray:
        return self._sum(self.gain_B)

    @property
    def has_positive_G(self) -> npt.NDArray[np.bool_]:
        return self.gain_G > 0

    def auc(self) -> FloatArray:
        """The share of pairs of a positive and a negative that are in order; NaN if the group lacks one of them."""
        misses_B = self.size_B - self.gain_B
        misses_G = self._sum(misses_B)
        above_B = np.cumsum(misses_B) - misses_B
        above_B -= above_B[self.first_block_G][self.block_group_B]
        below_B = misses_G[self.block_group_B] - above_B - misses_B
        return _ratio(self._sum(self.gain_B * (below_B + misses_B / 2)), self.gain_G * misses_G)

    def ndcg(self, k: int) -> FloatArray:
        """Discounted gain of the first k over that of the best order; NaN for a group without a positive."""
        discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])  # of the first j positions
        first_B, last_B = self._places(k)
        discount_B = discounts[last_B] - discounts[first_B]
        return _ratio(self._sum(self.gain_B / self.size_B * discount_B), self._best_gain(k, discounts))

    def _best_gain(self, k: int, discounts: FloatArray) -> FloatArray:
        if not len(self.sorted_labels_N):
            best_G: FloatArray = discounts[np.minimum(self.gain_G.astype(np.int64), k)]
            return best_G
        starts_G = np.cumsum(self.size_G) - self.size_G
        position_N = np.arange(len(self.sorted_labels_N)) - np.repeat(starts_G, self.size_G)
        discount_N = np.where(position_N < k, 1 / np.log2(position_N + 2), 0.0)
        gains_G: FloatArray = np.add.reduceat(self.sorted_labels_N * discount_N, starts_G)
        return gains_G

    def recall(self, k: int) -> FloatArray:
        """The share of the positives among the first k; NaN for a group without a positive."""
        first_B, last_B = self._places(k)
        return _ratio(self._sum(self.gain_B / self.size_B * (last_B - first_B)), self.gain_G)

    def hit_rate(self, k: int) -> FloatArray:
        """The probability that the first k contain a positive; NaN for a group without one."""
        block_G, has_one_G = self._first_positive()
        above, size, positive = (of_B[block_G] for of_B in (self.position_B, self.size_B, self.num_positive_B))
        slots = np.clip(k - above, 0, size)
        # All slots go to negatives: C(size - positive, slots) / C(size, slots).
        misses = np.minimum(slots, size - positive)
        log_miss = self._log_choose(size - positive, misses) - self._log_choose(size, slots)
        miss = np.where(slots > size - positive, 0.0, np.exp(log_miss))
        miss[slots == 0] = 1.0
        return np.where(has_one_G, 1 - miss, np.nan)

    def reciprocal_rank(self) -> FloatArray:
        """1 / rank of the first positive; NaN for a group without one."""
        block_G, has_one_G = self._first_positive()
        above, size, positive = (of_B[block_G] for of_B in (self.position_B, self.size_B, self.num_positive_B))
        found = 1 / (above + 1.0)
        tied = np.flatnonzero(has_one_G & (positive < size))
        if len(tied):
            # The first of p positives among m tied samples is the j-th with probability C(m - j, p - 1) / C(m, p).
            counts = size[tied] - positive[tied] + 1
            group, starts = np.repeat(tied, counts), np.cumsum(counts) - counts
            j = np.arange(counts.sum()) - np.repeat(starts, counts) + 1
            m, p = size[group], positive[group]
            chance = np.exp(self._log_choose(m - j, p - 1) - self._log_choose(m, p))
            found[tied] = np.add.reduceat(chance / (above[group] + j), starts)
        return np.where(has_one_G, found, np.nan)

    def _first_positive(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """The first run of each group that holds a positive, and whether there is one (else the run is arbitrary)."""
        positive_B = np.flatnonzero(self.num_positive_B)
        place_G = np.searchsorted(positive_B, self.first_block_G)
        block_G = np.append(positive_B, 0)[place_G]
        return block_G, (place_G < len(positive_B)) & (self.block_group_B[block_G] == np.arange(len(self)))

    def _sum(self, of_B: npt.NDArray[np.generic]) -> FloatArray:
        summed_G: FloatArray = np.add.reduceat(of_B, self.first_block_G, dtype=np.float64)
        return summed_G

    def _places(self, k: int) -> tuple[IntArray, IntArray]:
        """Where each run begins and ends among the first k samples of its group."""
        return np.minimum(self.position_B, k), np.minimum(self.position_B + self.size_B, k)

    @cached_property
    def _log_factorials(self) -> FloatArray:
        longest = int(self.size_B.max(initial=1))
        return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, longest + 1)))])

    def _log_choose(self, n: IntArray, k: IntArray) -> FloatArray:
        table = self._log_factorials
        chosen: FloatArray = table[n] - table[k] - table[n - k]
        return chosen


def _ratio(above_G: FloatArray, below_G: FloatArray) -> FloatArray:
    return np.divide(above_G, below_G, out=np.full(len(above_G), np.nan), where=below_G > 0)
