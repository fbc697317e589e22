import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import target_attention
from tests.kernels.forced import forced
from tests.kernels.test_window_attention import WINDOWS, error, make_windows, run


def inputs_of(num_rows, num_samples, width, units, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, width), (num_rows, units), (num_samples, width), (num_samples, units), (units, width)]
    return [0.3 * torch.randn(shape, generator=generator) for shape in (*shapes, (units,), (units,))]


def test_two_rows_by_hand():
    """One unit: hidden = share of row + share of sample + 2 * row * target; slope 0.5, weight 3 * prelu(hidden)."""
    one = torch.ones(1, dtype=torch.int64)
    tensors = [
        torch.tensor([[1.0], [-1.0]]),
        torch.tensor([[0.5], [0.25]]),
        torch.tensor([[2.0], [7.0]]),
        torch.tensor([[1.0], [9.0]]),
        torch.tensor([[2.0]]),
        torch.tensor([0.5]),
        torch.tensor([3.0]),
    ]
    windows = torch.tensor([0, 1]), torch.tensor([2, 0])
    # hidden: 0.5 + 1 + 4 = 5.5 and 0.25 + 1 - 4 = -2.75; weights 16.5 and -4.125; sum 16.5 + 4.125
    assert target_attention(*tensors, *windows).tolist() == [[20.625], [0.0]]
    with pytest.raises(ValueError, match="2 shares and 2 targets of 1 samples"):
        target_attention(*tensors, one, one)


@pytest.mark.parametrize(("width", "units"), [(8, 8), (32, 40), (16, 24), (6, 8), (8, 5)])
@pytest.mark.parametrize("name", WINDOWS)
def test_it_is_as_exact_as_torch(name, width, units):
    """At most twice torch's error and a millionth: weights' gradients sum hundreds of pairs, here one after another."""
    starts, lengths = make_windows(name)
    tensors = inputs_of(160, len(starts), width, units)
    exact, exact_gradients = run(target_attention, *(tensor.double() for tensor in tensors), starts, lengths)
    plain, plain_gradients = run(target_attention, *tensors, starts, lengths, kernel="reference")
    ours, gradients = run(target_attention, *tensors, starts, lengths, kernel="cpu")
    found = zip((ours, *gradients), (plain, *plain_gradients), (exact, *exact_gradients), strict=True)
    for mine, theirs, wanted in found:
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        assert error(mine, wanted) <= 2 * error(theirs, wanted) + 1e-6 * max(largest, 1.0)


@given(
    windows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=80),
    num_threads=st.integers(1, 4),
)
def test_gradients_do_not_depend_on_threads(windows, num_threads):
    starts, lengths = torch.tensor(windows).T.contiguous()
    tensors = inputs_of(52, len(windows), 8, 16)
    with forced(threads=1):
        one, gradients = run(target_attention, *tensors, starts, lengths)
    with forced(threads=num_threads):
        many, others = run(target_attention, *tensors, starts, lengths)
    assert torch.equal(one, many)
    assert all(torch.equal(mine, other) for mine, other in zip(gradients, others, strict=True))


def test_windows_outside_of_the_rows_are_refused():
    tensors = inputs_of(4, 1, 8, 8)
    with pytest.raises((ValueError, RuntimeError), match="outside of the 4 rows"):
        target_attention(*tensors, torch.tensor([3]), torch.tensor([2]))
