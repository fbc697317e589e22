"""Estimates from random rows how many rows of a table are read at least a given number of times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import beta
from scipy.stats import t as student_t

from recmill.artifacts.plan import SizeEstimate

NUM_CHUNKS = 35
CHUNK_ROWS = 1_024
MIN_HITS = 100  # with fewer, the mean of a chunk is not normal: use the exact binomial interval


def estimate_hot_rows(
    counts: npt.NDArray[np.integer],
    threshold: float,
    *,
    confidence: float,
    seed: int = 0,
) -> SizeEstimate:
    """Estimate how many of `counts` (one per row of the table) are at least `threshold`, by a t-interval over chunks.

    A chunk is CHUNK_ROWS random rows, not neighbours, because ids are often assigned in order of popularity. A table
    that is no larger than all chunks together is counted exactly.
    """
    num_rows = len(counts)
    if num_rows <= NUM_CHUNKS * CHUNK_ROWS:
        exact = float((counts >= threshold).sum())
        return SizeEstimate(num_rows=exact, low=exact, high=exact, confidence=confidence)
    drawn = np.random.default_rng(seed).choice(num_rows, size=(NUM_CHUNKS, CHUNK_ROWS), replace=False)
    hits = (counts[drawn] >= threshold).sum(axis=1)
    scale, num_drawn, total = num_rows / CHUNK_ROWS, NUM_CHUNKS * CHUNK_ROWS, int(hits.sum())
    if total < MIN_HITS or num_drawn - total < MIN_HITS:
        tail = (1 - confidence) / 2
        low = float(beta.ppf(tail, total, num_drawn - total + 1)) if total else 0.0
        high = float(beta.ppf(1 - tail, total + 1, num_drawn - total)) if total < num_drawn else 1.0
        middle = total / num_drawn
        return SizeEstimate(num_rows=middle * num_rows, low=low * num_rows, high=high * num_rows, confidence=confidence)
    mean = float(hits.mean())
    width = float(student_t.ppf((1 + confidence) / 2, NUM_CHUNKS - 1) * hits.std(ddof=1) / np.sqrt(NUM_CHUNKS))
    low, high = max(0.0, mean - width) * scale, min(float(CHUNK_ROWS), mean + width) * scale
    return SizeEstimate(num_rows=mean * scale, low=low, high=high, confidence=confidence)
