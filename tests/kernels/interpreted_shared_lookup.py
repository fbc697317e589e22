"""Triton's shared lookups against their references; test_triton.py runs this file."""

import pytest
import torch

from kernels import shared_lookup, shared_scatter
from kernels.shared_lookup import SharedFeature, SharedFeatures, SharedLayout

IDS = torch.tensor([0, 1, 7, 40, -1, -(2**63), 2**63 - 1, 2**40, 2**41 + 3, 7, 1, 3])
OFFSETS = torch.tensor([0, 3, 3, 5, 6, 10, 12])


@pytest.mark.parametrize(
    ("mode", "exact", "pooled"), [("sum", 5, True), ("mean", 0, True), ("mean", 12, True), ("sum", 12, False)]
)
def test_it_matches_the_reference(mode, exact, pooled):
    layout = SharedLayout(size=301, block_size=5, seed=3)
    first = {"exact_start": 0, "num_exact": 3, "exact_base": 304, "exact_width": exact} if exact else {}
    dims = (70, 9) if pooled else (12, 12)
    features = SharedFeatures.of(
        [
            SharedFeature(key=layout.table_key(0), dim=dims[0], is_mean=mode == "mean", **first),
            SharedFeature(key=layout.table_key(1), dim=dims[1], is_mean=mode == "mean"),
        ],
        torch.tensor([1, 7, 40]) if exact else None,
    )
    generator = torch.Generator().manual_seed(0)
    array = torch.randn(304 + 3 * exact if exact else 301, generator=generator, dtype=torch.float64)
    results = []
    for kernel in ("reference", "triton"):
        leaf = array.clone().requires_grad_()
        how = {"layout": layout, "features": features, "is_pooled": pooled, "kernel": kernel}
        vectors = shared_lookup(leaf, IDS, OFFSETS, **how)
        vectors.backward(torch.arange(vectors.numel(), dtype=torch.float64).view_as(vectors).sin())
        results.append([vectors.detach(), leaf.grad])
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
