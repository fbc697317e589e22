"""Triton's shared lookups against their references; test_triton.py runs this file."""

import pytest
import torch

from kernels import shared_lookup, shared_scatter
from kernels.shared_lookup import SharedFeature, SharedFeatures, SharedLayout

IDS = torch.tensor([0, 1, 7, 40, -1, -(2**63), 2**63 - 1, 2**40, 2**41 + 3, 7, 1, 3])
OFFSETS = torch.tensor([0, 3, 3, 5, 6, 10, 12])


@pytest.mark.parametrize("mapping", ["robe", "randomfold"])
@pytest.mark.parametrize(
    ("mode", "weighted", "exact", "pooled", "sign"),
    [
        ("sum", True, 5, True, False),
        ("mean", True, 0, True, True),
        ("max", False, 12, True, True),
        ("sum", False, 12, False, True),
        ("sum", True, 0, False, False),
    ],
)
def test_it_matches_the_reference(mapping, mode, weighted, exact, pooled, sign):
    layout = SharedLayout(size=301, mapping=mapping, block_size=5, sign=sign, seed=3)
    first = {"exact_start": 0, "num_exact": 3, "exact_base": 304, "exact_width": exact} if exact else {}
    dims = (70, 9) if pooled else (12, 12)
    features = SharedFeatures.of(
        [
            SharedFeature(key=layout.table_key(0), dim=dims[0], mode=mode, **first),
            SharedFeature(key=layout.table_key(1), dim=dims[1], mode=mode, base=50 * dims[0]),
        ],
        torch.tensor([1, 7, 40]) if exact else None,
    )
    generator = torch.Generator().manual_seed(0)
    array = torch.randn(304 + 3 * exact if exact else 301, generator=generator, dtype=torch.float64)
    given = torch.rand(len(IDS), generator=generator, dtype=torch.float64)
    results = []
    for kernel in ("reference", "triton"):
        leaf = array.clone().requires_grad_()
        weights = given.clone().requires_grad_() if weighted else None
        vectors = shared_lookup(
            leaf,
            IDS,
            OFFSETS,
            layout=layout,
            features=features,
            weights_N=weights,
            is_pooled=pooled,
            kernel=kernel,
        )
        vectors.backward(torch.arange(vectors.numel(), dtype=torch.float64).view_as(vectors).sin())
        results.append([vectors.detach(), leaf.grad] + ([weights.grad] if weighted else []))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_step_of_sgd_is_the_cpus():
    layout = SharedLayout(size=100, block_size=4)
    features = SharedFeatures.of([SharedFeature(key=layout.table_key(0), dim=8)])
    gradient = torch.randn(len(OFFSETS) - 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stepped = []
    for kernel in ("cpu", "triton"):
        array = torch.ones(100, dtype=torch.float64)
        shared_scatter(array, gradient, IDS, OFFSETS, layout=layout, features=features, scale=-0.1, kernel=kernel)
        stepped.append(array)
    torch.testing.assert_close(*stepped)
