import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from recmill.training.metrics.pointwise import measure_accuracy, roc_points, thin_curve


@given(st.lists(st.tuples(st.integers(-5, 5).map(lambda n: n / 2), st.integers(0, 1)), min_size=2, max_size=200))
@settings(deadline=None, max_examples=200)
def test_auc_and_log_loss_equal_scikit_learns_ties_included(samples):
    logits = np.array([logit for logit, _ in samples])
    labels = np.array([label for _, label in samples])
    accuracy = measure_accuracy(logits, labels)
    probabilities = 1 / (1 + np.exp(-logits))
    assert accuracy.log_loss == pytest.approx(log_loss(labels, probabilities, labels=[0, 1]), abs=1e-12)
    if 0 < labels.mean() < 1:
        assert accuracy.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    else:
        assert accuracy.auc is None


def test_normalised_entropy_is_one_for_the_base_rate():
    labels = np.array([1, 0, 0, 0])
    logits = np.full(4, np.log(0.25 / 0.75))
    assert measure_accuracy(logits, labels).normalised_entropy == pytest.approx(1.0)


def test_huge_logits_do_not_overflow():
    accuracy = measure_accuracy(np.array([1e4, -1e4]), np.array([1, 0]))
    assert accuracy.log_loss == 0.0
    assert accuracy.auc == 1.0


def test_thinned_roc_curve_keeps_its_ends():
    rng = np.random.default_rng(0)
    fpr, tpr, _ = thin_curve(roc_points(rng.normal(size=5000), rng.integers(0, 2, 5000)))
    assert len(fpr) == 200
    assert (fpr[0], tpr[0]) == (0, 0)
    assert (fpr[-1], tpr[-1]) == (1, 1)


def test_a_curve_of_one_class_has_finite_points():
    for label in (0, 1):
        fpr, tpr, _ = roc_points(np.arange(3.0), np.full(3, label, np.float32))
        assert (fpr[-1], tpr[-1]) == (1 - label, label)
