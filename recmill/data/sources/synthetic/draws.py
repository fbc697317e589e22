"""What synthetic logs draw: sizes of sessions, gaps between their samples, session ids, and ids by Zipf's law."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtr

SIZE_SIGMA = 1.0  # of the log-normal session size: the largest 10% of sessions hold a third of the samples
GAP_SIGMA = 1.2
MAX_GAP_MS = 30 * 60 * 1000  # a longer gap would end the session


def draw_session_sizes(rng: np.random.Generator, count: int, *, mean: float, max_size: int) -> npt.NDArray[np.int64]:
    """Heavy-tailed session sizes in [1, max_size] whose expectation is exactly `mean`.

    size = 1 + floor(Y + U) with Y a log-normal capped at max_size - 1 and U uniform: adding U before rounding keeps
    the expectation of Y, and Y is scaled so that its expectation *after* the cap is mean - 1.
    """
    if mean == 1:
        return np.ones(count, dtype=np.int64)
    cap = float(max(max_size - 1, int(np.ceil(mean))))
    scale = brentq(lambda scale: _capped_mean(scale, cap) - (mean - 1), -60, 60)
    continuous = np.minimum(np.exp(scale + SIZE_SIGMA * rng.standard_normal(count)), cap)
    sizes: npt.NDArray[np.int64] = 1 + np.floor(continuous + rng.random(count)).astype(np.int64)
    return sizes


def _capped_mean(scale: float, cap: float) -> float:
    """E[min(Y, cap)] for log Y ~ Normal(scale, SIZE_SIGMA)."""
    z = (np.log(cap) - scale) / SIZE_SIGMA
    return float(np.exp(scale + SIZE_SIGMA**2 / 2) * ndtr(z - SIZE_SIGMA) + cap * ndtr(-z))


def draw_gaps_ms(rng: np.random.Generator, count: int, *, mean_s: float) -> npt.NDArray[np.int64]:
    """Heavy-tailed gaps between the samples of a session: log-normal with this mean, from 1 ms to 30 minutes."""
    scale = np.log(mean_s * 1000) - GAP_SIGMA**2 / 2
    gaps = np.exp(scale + GAP_SIGMA * rng.standard_normal(count, dtype=np.float32))
    waits: npt.NDArray[np.int64] = np.clip(gaps, 1, MAX_GAP_MS).astype(np.int64)
    return waits


def name_sessions(numbers: npt.NDArray[np.integer[Any]], *, seed: int) -> npt.NDArray[np.int64]:
    """A distinct id below 2**53 for every session number, unordered: sorting by session is not sorting by time.

    Odd multipliers and x ^= x >> k are bijections of 53-bit numbers, which JSON and double precision keep exactly.
    """
    mask = np.uint64(2**53 - 1)
    ids = numbers.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**53)
    for multiplier in (0x1B873593CC9E2D, 0x165667B19E3779):
        ids = (ids * np.uint64(multiplier)) & mask
        ids ^= ids >> np.uint64(27)
    return ids.astype(np.int64)


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
