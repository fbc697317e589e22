"""Ratios and AUC differences of `recmill compare` over paired repeats, against hand-computed values."""

import math

import numpy as np
import pytest

from recmill.report.ablation import MeasuredVariant, auc_difference, bootstrap_interval, speed_interval, speed_ratio


def variant(name: str, rates: list[float], aucs: list[float], seconds: list[float | None]) -> MeasuredVariant:
    repeats = [
        {"samples_per_s": rate, "auc": auc, "evaluations": [[1.0, 0.5], *([[late, auc]] if late else [])]}
        for rate, auc, late in zip(rates, aucs, seconds, strict=True)
    ]
    return MeasuredVariant(name=name, switches=frozenset(), repeats=repeats)


@pytest.fixture
def baseline() -> MeasuredVariant:
    return variant("baseline", [100, 200, 400], [0.70, 0.72, 0.74], [4.0, 4.0, 4.0])


def test_the_ratio_is_the_geometric_mean_of_pairs(baseline):
    ours = variant("+dedup", [100, 400, 1600], [0.71, 0.72, 0.75], [3.0, 2.0, None])
    assert speed_ratio(ours, baseline) == pytest.approx(2.0)  # of 1, 2 and 4
    low, high = speed_interval(ours, baseline)
    assert 1.0 / 1.3 < low < 2.0 < high < 4.0 * 1.3
    assert speed_interval(baseline, baseline) is None


def test_the_auc_difference_has_the_standard_error_of_paired_seeds(baseline):
    ours = variant("+dedup", [100, 200, 400], [0.71, 0.72, 0.75], [3.0, 2.0, None])
    difference, error = auc_difference(ours, baseline)
    assert difference == pytest.approx(0.02 / 3)
    assert error == pytest.approx(0.01 / 3)  # differences 0.01, 0, 0.01: deviation 0.01 / sqrt(3)


def test_time_to_auc_is_that_of_most_repeats(baseline):
    assert variant("a", [1, 1, 1], [0.71, 0.72, 0.75], [3.0, 2.0, None]).seconds_to_auc_of(baseline) == 3.0
    assert variant("b", [1, 1, 1], [0.71, 0.72, 0.75], [3.0, None, None]).seconds_to_auc_of(baseline) is None
    assert variant("c", [1, 1, 1], [0.60, 0.60, 0.75], [3.0, 2.0, 2.0]).seconds_to_auc_of(baseline) is None


def test_the_bootstrap_interval_is_that_of_a_normal_mean():
    values = np.random.default_rng(1).normal(size=200)
    low, high = bootstrap_interval(values.tolist())
    expected = 1.96 * values.std(ddof=1) / math.sqrt(200)
    assert low == pytest.approx(values.mean() - expected, abs=0.01)
    assert high == pytest.approx(values.mean() + expected, abs=0.01)
    assert bootstrap_interval([3.0, 3.0]) == (3.0, 3.0)
