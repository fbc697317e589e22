from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_layers import DenseLayers, dense_layers, reference
from tests.kernels.forced import forced

CPUS = {"AVX-512": {}, "AVX2": {"is_narrow": True}, "any": {"is_portable": True}}


def layers_of(widths, *, has_bias=True, ends_with_relu=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (
            torch.randn(outputs, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, generator=generator) if has_bias else None,
        )
        for inputs, outputs in pairwise(widths)
    ]
    return DenseLayers(pairs, ends_with_relu=ends_with_relu)


def test_layers_by_hand():
    layers = DenseLayers(
        [(torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([0.5, 0.0])), (torch.tensor([[1.0, 10.0]]), None)]
    )
    x_NK = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]])
    for kernel in ("cpu", "reference"):
        # first layer with ReLU: [1.5, 2], [0, 0], [0, 0]
        assert dense_layers(layers, x_NK, kernel=kernel).tolist() == [[21.5], [0.0], [0.0]]
        start_RO, start_N = torch.tensor([[1.0, 1.0], [100.0, 0.0]]), torch.tensor([0, 1, 1])
        # in place of the bias: [2, 3], [99, 0], [97, 0]
        found = dense_layers(layers, x_NK, start_RO=start_RO, start_N=start_N, kernel=kernel)
        assert found.tolist() == [[32.0], [99.0], [97.0]]


@given(
    widths=st.lists(st.sampled_from([1, 2, 7, 15, 16, 17, 32, 33, 100, 129, 260]), min_size=2, max_size=4),
    num_rows=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12, 63, 64, 65, 130]),
    has_bias=st.booleans(),
    ends_with_relu=st.booleans(),
    start=st.sampled_from(["none", "one", "rows"]),
    cpu=st.sampled_from([*CPUS]),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_layers_are_as_exact_as_torch(widths, num_rows, has_bias, ends_with_relu, start, cpu, num_threads):
    plain = layers_of(widths, has_bias=has_bias, ends_with_relu=ends_with_relu)
    x_NK = torch.randn(num_rows, widths[0], generator=torch.Generator().manual_seed(1))
    how = {}
    if start != "none":
        how["start_RO"] = torch.randn(1 if start == "one" else 5, widths[1], generator=torch.Generator().manual_seed(2))
    if start == "rows":
        how["start_N"] = torch.arange(num_rows) * 3 % 5
    exact_layers = [(weight.double(), None if bias is None else bias.double()) for weight, bias in plain.layers]
    exact = reference.dense_layers(
        SimpleNamespace(layers=exact_layers, ends_with_relu=ends_with_relu),
        x_NK.double(),
        how["start_RO"].double() if how else None,
        how.get("start_N"),
    )
    torchs = dense_layers(plain, x_NK, **how, kernel="reference")
    with forced(threads=num_threads, **CPUS[cpu]):
        found = dense_layers(plain, x_NK, **how)
    assert found.shape == exact.shape
    if num_rows:
        # One running sum per output; torch's product with a single row has several.
        assert (found - exact).abs().max() <= 2 * (torchs - exact).abs().max() + 3e-6


@pytest.mark.parametrize("cpu", CPUS)
def test_a_row_has_the_same_bits_in_any_company(cpu):
    layers, x_NK = layers_of([29, 256, 128, 1]), torch.randn(131, 29, generator=torch.Generator().manual_seed(0))
    with forced(**CPUS[cpu]):
        alone = torch.cat([dense_layers(layers, row[None]) for row in x_NK])
        for threads in (1, 3):
            with forced(threads=threads, **CPUS[cpu]):
                assert torch.equal(dense_layers(layers, x_NK), alone)
                assert torch.equal(dense_layers(layers, x_NK[5:11]), alone[5:11])


def test_what_does_not_fit_is_refused():
    layers, x_NK = layers_of([3, 4, 2]), torch.zeros(5, 3)
    start_RO = torch.zeros(2, 4)
    wrong = [
        (lambda: dense_layers(layers, torch.zeros(5, 4)), "rows of 3 inputs"),
        (lambda: dense_layers(layers, x_NK.double()), "dtype is float64"),
        (lambda: dense_layers(layers, x_NK, start_RO=start_RO), "start: expected one row of 4"),
        (lambda: dense_layers(layers, x_NK, start_RO=torch.zeros(1, 3)), "start: expected one row of 4"),
        (
            lambda: dense_layers(layers, x_NK, start_RO=start_RO, start_N=torch.tensor([0, 1, 2, 0, 0])),
            r"rows in \[0, 2\)",
        ),
        (
            lambda: dense_layers(layers, x_NK, start_RO=start_RO, start_N=torch.tensor([0, -1, 0, 0, 0])),
            r"rows in \[0, 2\)",
        ),
        (lambda: dense_layers(layers, x_NK, start_RO=start_RO, start_N=torch.tensor([0])), "expected 5"),
        (lambda: DenseLayers([(torch.zeros(4, 3), None), (torch.zeros(2, 5), None)]), "layer 1 has 5 inputs"),
        (lambda: DenseLayers([(torch.zeros(4, 0), None)]), "at least one row and column"),
        (lambda: DenseLayers([(torch.zeros(4, 3), torch.zeros(3))]), "expected 4"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
