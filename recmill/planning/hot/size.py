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
    confidence: float = 0.999,
    num_chunks: int = NUM_CHUNKS,
    chunk_rows: int = CHUNK_ROWS,
    seed: int = 0,
) -> SizeEstimate:
    """Estimate how many of `counts` (one per row of the table) are at least `threshold`, by a t-interval over chunks.

    A chunk is `chunk_rows` random rows, not neighbours, because ids are often assigned in order of popularity. A table
    that is no larger than all chunks together is counted exactly.
    """
    num_rows = len(counts)
    if num_rows <= num_chunks * chunk_rows:
        exact = float((counts >= threshold).sum())
        return SizeEstimate(num_rows=exact, low=exact, high=exact, confidence=confidence)
    drawn = np.random.default_rng(seed).choice(num_rows, size=(num_chunks, chunk_rows), replace=False)
    hits = (counts[drawn] >= threshold).sum(axis=1)
    return interval_of(hits, num_rows=num_rows, chunk_rows=chunk_rows, confidence=confidence)


def interval_of(hits: npt.NDArray[np.integer], *, num_rows: int, chunk_rows: int, confidence: float) -> SizeEstimate:
    """The estimate for a table of `num_rows` rows from the hot rows found in each chunk."""
    scale, num_chunks, total = num_rows / chunk_rows, len(hits), int(hits.sum())
    if total < MIN_HITS or num_chunks * chunk_rows - total < MIN_HITS:
        num_drawn, tail = num_chunks * chunk_rows, (1 - confidence) / 2
        low = float(beta.ppf(tail, total, num_drawn - total + 1)) if total else 0.0
        high = float(beta.ppf(1 - tail, total + 1, num_drawn - total)) if total < num_drawn else 1.0
        middle = total / num_drawn
        return SizeEstimate(num_rows=middle * num_rows, low=low * num_rows, high=high * num_rows, confidence=confidence)
    mean = float(hits.mean())
    width = float(student_t.ppf((1 + confidence) / 2, num_chunks - 1) * hits.std(ddof=1) / np.sqrt(num_chunks))
    low, high = max(0.0, mean - width) * scale, min(float(chunk_rows), mean + width) * scale
    return SizeEstimate(num_rows=mean * scale, low=low, high=high, confidence=confidence)
