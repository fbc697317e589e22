"""Shares of the most read rows are exact, and a Zipf law is recognised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.profiling.skew import SkewSummary, harmonic


def summary_of(num_rows: int, counts: np.ndarray, piece: int) -> SkewSummary:
    summary = SkewSummary(num_rows)
    for start in range(0, len(counts), piece):
        summary.add(counts[start : start + piece])
    return summary


@given(st.lists(st.integers(1, 1000), max_size=200), st.integers(0, 2000), st.integers(1, 50))
def test_shares_are_exact_whatever_the_pieces(counts: list[int], unread: int, piece: int) -> None:
    ranked = np.sort(np.array(counts, np.int64))[::-1]
    num_rows = max(1, len(counts) + unread)
    figures = summary_of(num_rows, ranked, piece)
    assert (figures.num_accesses, figures.num_distinct) == (sum(counts), len(counts))
    for share, found in figures.top_share.items():
        top = max(1, int(np.ceil(float(share) * num_rows)))
        assert found == pytest.approx(ranked[:top].sum() / max(1, sum(counts)))
    assert len(figures.curve) <= 100
    for point in figures.curve:
        assert point.share == pytest.approx(ranked[: point.rows].sum() / max(1, sum(counts)))


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("num_rows", [1000, 100_000])
def test_the_exponent_of_a_zipf_law_is_found(exponent: float, num_rows: int) -> None:
    weights = np.arange(1, num_rows + 1) ** -exponent
    drawn = np.random.default_rng(0).multinomial(300_000, weights / weights.sum())
    ranked = np.sort(drawn[drawn > 0])[::-1]
    assert summary_of(num_rows, ranked, 10_000).zipf_exponent == pytest.approx(exponent, abs=0.02)


def test_too_few_reads_give_no_exponent() -> None:
    assert summary_of(1000, np.ones(500, np.int64), 100).zipf_exponent is None
    assert summary_of(1, np.array([50]), 1).zipf_exponent is None


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.7])
def test_long_sums_agree_with_adding_up(exponent: float) -> None:
    exact = float((np.arange(1, 300_001, dtype=np.float64) ** -exponent).sum())
    assert harmonic(300_000, exponent) == pytest.approx(exact, rel=1e-9)
