import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import pointwise_attention
from tests.kernels.forced import forced
from tests.kernels.test_window_attention import WINDOWS, assert_as_exact_as_torch, make_windows, run


def inputs_of(num_rows, width, num_biases, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 3 * width, generator=generator), torch.randn(num_biases, generator=generator)


def test_three_rows_by_hand():
    packed = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 10.0], [1.0, 3.0, 100.0]])
    bias = torch.tensor([0.0, -1.0, -2.0])
    silu = torch.nn.functional.silu(torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0])).tolist()
    rows = [silu[2], silu[1] + 10 * silu[3], silu[0] + 10 * silu[2] + 100 * silu[4]]
    for kernel in ("reference", "cpu"):
        options = {"num_heads": 1, "scale": 0.5, "kernel": kernel}
        windows = torch.tensor([0, 1]), torch.tensor([3, 0])
        found = pointwise_attention(packed, bias, *windows, **options)
        torch.testing.assert_close(found.flatten(), torch.tensor(rows) / 2)
        last = pointwise_attention(packed, bias, *windows, is_last_only=True, **options)
        torch.testing.assert_close(last.flatten(), torch.tensor([rows[2] / 2, 0.0]))


@pytest.mark.parametrize("is_last_only", [False, True])
@pytest.mark.parametrize(("num_heads", "width"), [(1, 4), (2, 32), (3, 36), (2, 128)])
@pytest.mark.parametrize("name", WINDOWS)
def test_it_is_as_exact_as_torch(name, num_heads, width, is_last_only):
    def op(*tensors, **options):
        return pointwise_attention(*tensors, num_heads=num_heads, scale=0.1, is_last_only=is_last_only, **options)

    assert_as_exact_as_torch(op, *inputs_of(160, width, 150), *make_windows(name))


@given(
    windows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=12),
    num_threads=st.integers(1, 4),
    is_last_only=st.booleans(),
)
def test_windows_that_overlap_anyhow_are_exact_on_any_number_of_threads(windows, num_threads, is_last_only):
    starts, lengths = torch.tensor(windows).T.contiguous()
    packed, bias = inputs_of(52, 8, 40)
    options = {"num_heads": 2, "scale": 0.1, "is_last_only": is_last_only}
    exact, exact_gradients = run(pointwise_attention, packed.double(), bias.double(), starts, lengths, **options)
    with forced(threads=1):
        ours, gradients = run(pointwise_attention, packed, bias, starts, lengths, **options)
    with forced(threads=num_threads):
        many, many_gradients = run(pointwise_attention, packed, bias, starts, lengths, **options)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=5e-6)
    assert torch.equal(ours, many)
    for mine, wanted, other in zip(gradients, exact_gradients, many_gradients, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine, other)


def test_what_does_not_fit_is_refused():
    packed, bias = inputs_of(4, 8, 2)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="with 5 heads"):
        pointwise_attention(packed, bias, one, one, num_heads=5, scale=1.0)
    with pytest.raises((ValueError, RuntimeError), match="the longest window has 3 rows"):
        pointwise_attention(packed, bias, one, 3 * one, num_heads=2, scale=1.0)
    with pytest.raises((ValueError, RuntimeError), match="outside of the 4 rows"):
        pointwise_attention(packed, bias, 3 * one, 2 * one, num_heads=2, scale=1.0)
