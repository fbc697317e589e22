"""Sizes of sessions, gaps between their samples, and session ids."""

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
