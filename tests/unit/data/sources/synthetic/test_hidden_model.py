import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from recmill.data.sources.synthetic.draws import ZipfSampler
from recmill.data.sources.synthetic.hidden_model import BestScores, draw_effects, solve_bias, sum_windows


@settings(max_examples=10, deadline=None)
@given(spread=st.floats(0.2, 4), shift=st.floats(-3, 3), seed=st.integers(0, 50))
def test_scores_agree_with_scikit_learn(spread, shift, seed):
    rng = np.random.default_rng(seed)
    logits = (shift + spread * rng.standard_normal(20_000)).astype(np.float32)
    labels = (rng.random(20_000) < expit(logits)).astype(np.float32)
    scores = BestScores()
    for half in (slice(0, 7000), slice(7000, None)):
        scores.add(logits[half], labels[half])
    if labels.min() < labels.max():
        assert scores.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-3)
    assert scores.log_loss == pytest.approx(log_loss(labels, expit(logits), labels=[0, 1]), abs=0.02)


def test_no_auc_exists_for_one_label():
    scores = BestScores()
    scores.add(np.zeros(5, dtype=np.float32), np.ones(5, dtype=np.float32))
    assert scores.auc is None


def test_effects_are_standardised_over_the_accesses():
    sampler = ZipfSampler(num_rows=1000, exponent=1.1, seed=0)
    seen = draw_effects(sampler, popular_rows=50, seed=1)[sampler.draw(np.random.default_rng(2), 400_000)]
    assert seen.mean() == pytest.approx(0, abs=0.02)
    assert seen.std() == pytest.approx(1, abs=0.02)


def test_a_table_of_one_row_has_no_effect():
    sampler = ZipfSampler(num_rows=1, exponent=1.0, seed=0)
    assert draw_effects(sampler, popular_rows=50, seed=1).tolist() == [0.0]


def test_windows_are_summed():
    effects = np.array([1.0, 10.0, 100.0], dtype=np.float32)
    sums = sum_windows(effects, np.array([0, 1, 2, 2]), np.array([0, 1, 2]), np.array([2, 3, 0]))
    assert sums.tolist() == [11.0, 210.0, 0.0]


@pytest.mark.parametrize("base_rate", [0.02, 0.25, 0.5])
def test_bias_gives_the_base_rate(base_rate):
    logits = solve_bias(base_rate=base_rate, logit_std=1.8) + 1.8 * np.random.default_rng(0).standard_normal(400_000)
    assert expit(logits).mean() == pytest.approx(base_rate, rel=0.02)
