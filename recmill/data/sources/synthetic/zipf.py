"""Ids whose popularity follows Zipf's law."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ZipfSampler:
    """Draws ids of a table: the k-th most popular of its rows with a probability proportional to k**-exponent.

    Exact for any exponent >= 0, by Walker's alias method: one uniform number and two table reads per draw (12 ns, where
    inverting the distribution by binary search takes 100 ns). A seeded permutation separates popularity from id order.
    """

    def __init__(self, *, num_rows: int, exponent: float, seed: int) -> None:
        weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
        self.num_rows = num_rows
        self.probability_by_rank: npt.NDArray[np.float64] = weights / weights.sum()
        self.id_by_rank = np.random.default_rng(seed).permutation(num_rows).astype(np.int32)
        threshold, alias = _alias_table(self.probability_by_rank)
        self._threshold = threshold.astype(np.float32)
        # The id and the alias of a cell lie side by side, so choosing one of them is one read.
        self._pairs = np.stack([self.id_by_rank, self.id_by_rank[alias]], axis=1).reshape(-1)

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
        position = rng.random(count)
        position *= self.num_rows
        cell = position.astype(np.int64)
        position -= cell
        is_alias = position >= self._threshold.take(cell, mode="clip")
        cell *= 2
        cell += is_alias
        return self._pairs.take(cell, mode="clip")

    def values_by_id(self, values_by_rank: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Values given by popularity rank, put in id order."""
        by_id = np.empty_like(values_by_rank)
        by_id[self.id_by_rank] = values_by_rank
        return by_id


def _alias_table(probability: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Threshold and alias of every cell, built with prefix sums instead of Vose's loop (20 ms for a million rows).

    Cells are 1/n wide. Light outcomes leave room in their cells, heavy ones overflow theirs. Taken in order, light i is
    filled by the first heavy j whose surplus exceeds the room of the lights before i. A heavy whose surplus ends while
    it fills a light leaves room in its own cell, which the next heavy fills.
    """
    scaled = probability * len(probability)
    light = np.flatnonzero(scaled < 1)
    heavy = np.flatnonzero(scaled >= 1)
    threshold = np.ones(len(probability))
    alias = np.arange(len(probability))
    if len(light) == 0 or len(heavy) == 0:  # uniform, up to rounding
        return threshold, alias
    room = np.cumsum(1 - scaled[light])
    surplus = np.cumsum(scaled[heavy] - 1)
    room_before = np.concatenate([[0.0], room[:-1]])
    filler = np.minimum(np.searchsorted(surplus, room_before, side="right"), len(heavy) - 1)
    threshold[light] = scaled[light]
    alias[light] = heavy[filler]
    dry_at = np.searchsorted(room, surplus, side="right")  # the light during which the surplus of heavy j ends
    dry_at[-1] = len(light)  # the last heavy fills the rest
    # A heavy whose surplus ends exactly before that light keeps its cell.
    fills = (dry_at < len(light)) & (surplus > room_before[np.minimum(dry_at, len(light) - 1)])
    j = np.flatnonzero(fills)
    threshold[heavy[j]] = 1 + surplus[j] - room[dry_at[j]]
    alias[heavy[j]] = heavy[j + 1]
    return threshold, alias
