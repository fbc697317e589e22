"""Everything together: calibration, standard errors, slices."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, roc_auc_score
from torchrec.metrics.calibration import compute_calibration, get_calibration_states

from recmill.training.metrics import summary
from recmill.training.metrics.bootstrap import resampled_areas, session_weights
from recmill.training.metrics.calibration import bin_starts
from recmill.training.metrics.catalogue import headline_numbers, metric_names
from recmill.training.metrics.slices import cut_slices
from recmill.training.metrics.summary import HeldOut, measure_quality


def sessions(num_sessions=400, size=5, seed=0, effect=1.0):
    """Samples of sessions that share a level, so that samples of one session are alike."""
    rng = np.random.default_rng(seed)
    session = np.repeat(np.arange(num_sessions), size)
    truth = effect * rng.normal(size=num_sessions)[session] + rng.normal(size=len(session)) - 0.5
    labels = (rng.random(len(session)) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    return HeldOut(logits_N=(0.8 * truth).astype(np.float32), labels_N=labels, session_N=session * 7 - 100)


def test_calibration_and_reliability_equal_scikit_learns_and_torchrecs():
    held_out = sessions()
    quality = measure_quality(held_out, num_resamples=10)
    predicted = 1 / (1 + np.exp(-held_out.logits_N.astype(np.float64)))
    observed, mean_predicted = calibration_curve(held_out.labels_N, predicted, n_bins=20, strategy="quantile")
    np.testing.assert_allclose([entry.observed for entry in quality.reliability], observed, atol=1e-12)
    np.testing.assert_allclose([entry.predicted for entry in quality.reliability], mean_predicted, atol=1e-12)
    assert quality.values["ece"] == pytest.approx(np.abs(observed - mean_predicted).mean(), abs=1e-12)
    rows = torch.from_numpy(held_out.labels_N)[None].double(), torch.from_numpy(predicted)[None]
    states = get_calibration_states(*rows, torch.ones_like(rows[0]))
    expected = compute_calibration(states["calibration_num"], states["calibration_denom"])
    assert quality.values["calibration"] == pytest.approx(float(expected[0]), abs=1e-12)


def test_equal_scores_share_a_bin():
    assert bin_starts(np.array([1.0, 2.0, 2.0, 2.0, 3.0, 4.0]), 3).tolist() == [0, 1, 4]
    assert bin_starts(np.zeros(100), 20).tolist() == [0]


def test_group_auc_is_weighted_by_samples_and_counts_groups_of_one_class():
    #            group 0: AUC 1, 2 samples    group 1: AUC 0, 3 samples    group 2: one class
    held_out = HeldOut(
        logits_N=np.array([2.0, 1.0, 1.0, 2.0, 3.0, 5.0]),
        labels_N=np.array([1, 0, 1, 0, 0, 1]),
        session_N=np.arange(6),
        user_N=np.array([9, 9, 4, 4, 4, 7]),
    )
    quality = measure_quality(held_out, num_resamples=5)
    assert quality.values["gauc"] == pytest.approx(2 / 5)
    assert quality.groups == {
        "kind": "user",
        "num_groups": 3,
        "num_one_class": 1,
        "num_sessions": 6,
        "num_without_positive": 3,
    }


def test_resampled_auc_equals_scikit_learns_with_weights():
    rng = np.random.default_rng(0)
    scores, labels = np.sort(rng.integers(0, 50, 600)).astype(float), rng.integers(0, 2, 600).astype(float)
    session = rng.integers(0, 100, 600)
    weights = list(session_weights(100, seed=3, num_resamples=5))
    for found, weights_S in zip(resampled_areas(scores, labels, session, weights), weights, strict=True):
        assert found == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights_S[session]), abs=1e-12)


def test_poisson_weights_have_mean_and_variance_one_and_follow_the_seed():
    weights = np.stack(list(session_weights(100_000, seed=1, num_resamples=3)))
    assert weights.mean() == pytest.approx(1, abs=0.01)
    assert weights.var() == pytest.approx(1, abs=0.02)
    again = np.stack(list(session_weights(100_000, seed=1, num_resamples=3)))
    assert (weights == again).all()
    assert (weights != np.stack(list(session_weights(100_000, seed=2, num_resamples=3)))).any()


def test_standard_errors_are_the_spread_over_fresh_samples():
    """The bootstrap of one data set predicts how metrics vary over data sets, although sessions are alike inside."""
    measured = [measure_quality(sessions(seed=seed), num_resamples=100) for seed in range(60)]
    for name in ("auc", "log_loss", "calibration", "gauc", "ndcg_at_5", "mrr"):
        spread = np.std([quality.values[name] for quality in measured], ddof=1)
        errors = [quality.standard_errors[name] for quality in measured]
        assert np.mean(errors) == pytest.approx(spread, rel=0.3), name


def test_errors_of_very_many_samples_come_from_some_sessions(monkeypatch):
    held_out = sessions(num_sessions=4000)
    whole = measure_quality(held_out).standard_errors
    monkeypatch.setattr(summary, "MAX_SAMPLES", 5_000)
    part = measure_quality(held_out).standard_errors
    for name in ("auc", "log_loss", "gauc", "ndcg_at_5"):
        assert part[name] == pytest.approx(whole[name], rel=0.35), name


def test_the_order_of_samples_and_the_numbers_of_sessions_do_not_matter():
    held_out = sessions()
    order = np.random.default_rng(1).permutation(len(held_out.labels_N))
    shuffled = HeldOut(
        logits_N=held_out.logits_N[order],
        labels_N=held_out.labels_N[order],
        session_N=held_out.session_N[order] * 3,
        user_N=held_out.session_N[order],
    )
    first, second = measure_quality(held_out), measure_quality(shuffled)
    for name, value in first.values.items():
        assert second.values[name] == pytest.approx(value, abs=1e-12), name
        if name in first.standard_errors:
            assert second.standard_errors[name] == pytest.approx(first.standard_errors[name], rel=1e-6), name


def test_slices_are_new_rare_and_frequent_ids():
    counts = {"item": np.array([0, 0, 1, 2, 8, 9, -1])}
    found = {entry.kind: (entry.low, entry.high, chosen.tolist()) for entry, chosen in cut_slices(counts)}
    assert found == {
        "new": (0, 1, [True, True, False, False, False, False, False]),
        "rare": (1, 5, [False, False, True, True, False, False, False]),
        "frequent": (5, None, [False, False, False, False, True, True, False]),
    }
    assert [entry.kind for entry, _ in cut_slices({"item": np.array([3, 3, 3])})] == ["frequent"]
    assert [entry.kind for entry, _ in cut_slices({"item": np.array([0, 0])})] == ["new"]


def test_accuracy_of_slices_equals_scikit_learns():
    held_out = sessions()
    counts = np.random.default_rng(0).integers(0, 10, len(held_out.labels_N))
    cut = HeldOut(**{**vars(held_out), "counts": {"item": counts}})
    for entry in measure_quality(cut).slices:
        chosen = (counts >= entry.low) & (counts < (entry.high or 99))
        logits, labels = held_out.logits_N[chosen].astype(np.float64), held_out.labels_N[chosen]
        assert entry.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
        assert entry.log_loss == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), abs=1e-12)
        assert 0 < entry.standard_errors["auc"] < 0.1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 1)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=50)
def test_any_predictions_can_be_measured_and_written_as_json(samples):
    session, logits, labels = (np.array(column) for column in zip(*samples, strict=True))
    held_out = HeldOut(logits_N=logits, labels_N=labels, session_N=session, counts={"item": session})
    found = measure_quality(held_out, num_resamples=3).to_json()
    json.dumps(found, allow_nan=False)
    assert all(entry.key in found for entry in metric_names(found))
    assert all(value is None or math.isfinite(value) for value in headline_numbers(found).values())
