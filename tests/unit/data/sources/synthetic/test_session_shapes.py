import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.data.sources.synthetic.draws import draw_gaps_ms, draw_session_sizes, name_sessions


@settings(max_examples=15, deadline=None)
@given(mean=st.floats(1.05, 30), seed=st.integers(0, 100))
def test_mean_session_size_is_the_one_asked_for(mean, seed):
    sizes = draw_session_sizes(np.random.default_rng(seed), 100_000, mean=mean, max_size=int(40 * mean))
    standard_error = sizes.std() / np.sqrt(len(sizes))
    assert sizes.mean() == pytest.approx(mean, abs=6 * standard_error)
    assert sizes.min() >= 1
    assert sizes.max() <= int(40 * mean)


def test_a_tight_cap_keeps_the_mean():
    sizes = draw_session_sizes(np.random.default_rng(0), 200_000, mean=8.0, max_size=16)
    assert sizes.max() == 16
    assert sizes.mean() == pytest.approx(8.0, rel=0.01)


def test_sizes_have_a_heavy_tail():
    sizes = np.sort(draw_session_sizes(np.random.default_rng(0), 100_000, mean=16.5, max_size=660))
    assert sizes[-10_000:].sum() / sizes.sum() > 0.3
    assert np.median(sizes) < 16.5 * 0.75


def test_mean_one_is_one_sample_a_session():
    assert set(draw_session_sizes(np.random.default_rng(0), 1000, mean=1.0, max_size=40).tolist()) == {1}


def test_gaps_are_whole_positive_milliseconds_with_the_mean():
    gaps = draw_gaps_ms(np.random.default_rng(0), 500_000, mean_s=15.0)
    assert gaps.min() >= 1
    assert gaps.mean() == pytest.approx(15_000, rel=0.03)


@given(st.integers(0, 2**40), st.integers(0, 2**31))
def test_session_names_are_distinct_and_fit_a_double(first, seed):
    names = name_sessions(np.arange(first, first + 500), seed=seed)
    assert len(set(names.tolist())) == 500
    assert names.min() >= 0
    assert names.max() < 2**53


def test_session_names_are_not_in_time_order():
    names = name_sessions(np.arange(2000), seed=0)
    assert abs(np.corrcoef(names, np.arange(2000))[0, 1]) < 0.1
