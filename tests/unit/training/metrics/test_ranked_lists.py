"""Ranked lists against scikit-learn, TorchRec, enumeration of all tie orders, and values by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score
from torchrec.metrics.gauc import get_auc_states
from torchrec.metrics.ndcg import _get_ndcg_states
from torchrec.metrics.recall_session import ranking_within_session

from recmill.training.metrics.lists import RankedLists

SAMPLE = st.tuples(st.integers(0, 4), st.integers(0, 3).map(float), st.integers(0, 1).map(float))
FRACTIONAL = st.tuples(st.integers(0, 4), st.integers(0, 3).map(float), st.sampled_from([0.0, 0.25, 0.75, 1.0]))


def arrays(samples):
    groups = np.unique([group for group, _, _ in samples], return_inverse=True)[1]
    return np.array([score for _, score, _ in samples]), np.array([label for _, _, label in samples]), groups


def test_values_by_hand():
    #        first session: positives are second and fourth      second session: nothing is clicked
    scores = np.array([5.0, 4.0, 3.0, 1.0, 0.3, 0.2])
    lists = RankedLists.of(scores, [0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1])
    ideal = 1 + 1 / math.log2(3)
    assert lists.ndcg(10)[0] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / ideal, abs=1e-15)
    assert lists.ndcg(1)[0] == 0.0
    assert lists.recall(2)[0] == 0.5
    assert lists.hit_rate(1)[0] == 0.0
    assert lists.hit_rate(2)[0] == 1.0
    assert lists.reciprocal_rank()[0] == 0.5
    assert lists.auc()[0] == 0.25  # of four pairs only (second, third) is in order
    assert all(math.isnan(found[1]) for found in (lists.auc(), lists.ndcg(3), lists.recall(3), lists.reciprocal_rank()))


@given(st.lists(SAMPLE, min_size=1, max_size=40))
@settings(deadline=None, max_examples=150)
def test_auc_per_group_equals_scikit_learns(samples):
    scores, labels, groups = arrays(samples)
    for group, found in enumerate(RankedLists.of(scores, labels, groups).auc()):
        own = groups == group
        if 0 < labels[own].mean() < 1:
            assert found == pytest.approx(roc_auc_score(labels[own], scores[own]), abs=1e-12)
        else:
            assert math.isnan(found)


@given(st.lists(FRACTIONAL, min_size=2, max_size=40), st.integers(1, 6))
@settings(deadline=None, max_examples=150)
def test_ndcg_equals_scikit_learns_ties_and_fractional_labels_included(samples, k):
    scores, labels, groups = arrays(samples)
    for group, found in enumerate(RankedLists.of(scores, labels, groups).ndcg(k)):
        own = groups == group
        if labels[own].sum() == 0:
            assert math.isnan(found)
        elif own.sum() > 1:  # scikit-learn refuses a list of one
            assert found == pytest.approx(ndcg_score([labels[own]], [scores[own]], k=k), abs=1e-12)


@given(
    st.lists(st.tuples(st.just(0), st.integers(0, 2).map(float), st.integers(0, 1).map(float)), max_size=6, min_size=1)
)
@settings(deadline=None, max_examples=60)
def test_ties_count_as_the_mean_over_all_their_orders(samples):
    scores, labels, groups = arrays(samples)
    orders = [
        [labels[i] for i in order]
        for order in itertools.permutations(range(len(samples)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    lists = RankedLists.of(scores, labels, groups)
    if not labels.any():
        assert math.isnan(lists.reciprocal_rank()[0])
        return
    assert lists.reciprocal_rank()[0] == pytest.approx(np.mean([1 / (order.index(1) + 1) for order in orders]))
    for k in (1, 2, 4, 9):
        assert lists.recall(k)[0] == pytest.approx(np.mean([sum(order[:k]) / labels.sum() for order in orders]))
        assert lists.hit_rate(k)[0] == pytest.approx(np.mean([float(any(order[:k])) for order in orders]))


def random_sessions(seed, num_sessions=50, size=8):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(num_sessions * size) / 1000.0 + 0.5  # no ties
    return scores, rng.integers(0, 2, num_sessions * size).astype(float), np.repeat(np.arange(num_sessions), size)


def test_ndcg_equals_torchrecs():
    scores, labels, groups = random_sessions(0)
    ones, tensors = torch.ones(1, len(scores)), [torch.from_numpy(values)[None] for values in (labels, scores, groups)]
    for k in (3, -1):
        states = _get_ndcg_states(
            labels=tensors[0], predictions=tensors[1], weights=ones.double(), session_ids=tensors[2],
            exponential_gain=False, k=k, report_ndcg_as_decreasing_curve=False,
        )  # fmt: skip
        ours = RankedLists.of(scores, labels, groups).ndcg(k if k > 0 else 100)
        assert np.nansum(ours) == pytest.approx(float(states["sum_ndcg"][0]), abs=1e-6)


def test_group_auc_equals_torchrecs_over_groups_of_one_size():
    scores, labels, groups = random_sessions(1)
    states = get_auc_states(
        torch.from_numpy(labels)[None].float(),
        torch.from_numpy(scores)[None].float(),
        torch.ones(1, len(scores)),
        torch.bincount(torch.from_numpy(groups)),
    )
    ours = RankedLists.of(scores, labels, groups).auc()
    assert np.nansum(ours) == pytest.approx(float(states["auc_sum"][0]), rel=1e-6)
    assert np.isfinite(ours).sum() == int(states["num_samples"][0])


def test_recall_equals_torchrecs_ranks_within_sessions():
    scores, labels, groups = random_sessions(2)
    ranks = ranking_within_session(torch.from_numpy(scores)[None], torch.from_numpy(groups)[None]).numpy()
    hits = np.bincount(groups, weights=labels * (ranks < 3))
    expected = hits / np.bincount(groups, weights=labels)
    np.testing.assert_allclose(RankedLists.of(scores, labels, groups).recall(3), expected, atol=1e-12)
