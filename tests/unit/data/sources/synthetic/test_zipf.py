import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.data.sources.synthetic.draws import ZipfSampler, _alias_table


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_alias_table_gives_back_every_probability(weights):
    probability = np.array(weights) / sum(weights)
    threshold, alias = _alias_table(probability)
    assert (threshold >= -1e-9).all()
    assert (threshold <= 1 + 1e-9).all()
    rebuilt = threshold / len(weights)
    np.add.at(rebuilt, alias, (1 - threshold) / len(weights))
    np.testing.assert_allclose(rebuilt, probability, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, 5000), exponent=st.floats(0, 2.5), seed=st.integers(0, 1000))
def test_draws_are_ids_of_the_table(num_rows, exponent, seed):
    ids = ZipfSampler(num_rows=num_rows, exponent=exponent, seed=seed).draw(np.random.default_rng(seed), 1000)
    assert ids.min() >= 0
    assert ids.max() < num_rows


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.2])
def test_exponent_is_recovered_from_the_counts(exponent):
    ids = ZipfSampler(num_rows=20_000, exponent=exponent, seed=1).draw(np.random.default_rng(2), 1_000_000)
    counts = np.sort(np.bincount(ids, minlength=20_000))[::-1]
    head = slice(0, 200)
    slope, _ = np.polyfit(np.log(np.arange(1, 201)), np.log(counts[head]), 1)
    assert slope == pytest.approx(-exponent, abs=0.03)


def test_counts_fit_the_exact_distribution():
    sampler = ZipfSampler(num_rows=100, exponent=1.1, seed=3)
    num_draws = 500_000
    counts = np.bincount(sampler.draw(np.random.default_rng(4), num_draws), minlength=100)[sampler.id_by_rank]
    expected = sampler.probability_by_rank * num_draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 148  # 99 degrees of freedom: exceeded once in 1000


def test_popularity_does_not_follow_id_order():
    sampler = ZipfSampler(num_rows=1000, exponent=1.0, seed=5)
    assert abs(np.corrcoef(sampler.id_by_rank, np.arange(1000))[0, 1]) < 0.15
