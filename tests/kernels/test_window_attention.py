import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import pool_windows, window_attention
from kernels.windows import window_rows_of
from tests.kernels.forced import forced

WINDOWS = {
    "overlapping": ([0, 1, 1, 3], [4, 4, 4, 5]),
    "one after another": ([0, 3, 3, 7], [3, 0, 4, 1]),
    "out of order": ([9, 0, 4, 4, 2], [3, 5, 1, 0, 7]),
    "long": ([0, 70, 3], [150, 64, 65]),
    "none": ([], []),
    "all empty": ([0, 2], [0, 0]),
}


def make_windows(name):
    starts, lengths = WINDOWS[name]
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)


def run(op, *inputs, **options):
    """What an op gives, and the gradients of its first tensors for a gradient that is the same for any kernel."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs if tensor is not None and tensor.is_floating_point()]
    others = [tensor for tensor in inputs if tensor is None or not tensor.is_floating_point()]
    out = op(*leaves, *others, **options)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if out.numel():
        out.backward(gradient.to(out.dtype))
    return out.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def error(found, expected):
    return float((found.double() - expected.double()).abs().max()) if expected.numel() else 0.0


def assert_as_exact_as_torch(op, *inputs, **options):
    """At most twice the error of the same formula in float32 torch, against float64."""
    exact, exact_gradients = run(op, *(t.double() if t.is_floating_point() else t for t in inputs), **options)
    plain, plain_gradients = run(op, *inputs, kernel="reference", **options)
    ours, our_gradients = run(op, *inputs, kernel="cpu", **options)
    assert ours.shape == exact.shape
    for mine, theirs, wanted in zip(
        (ours, *our_gradients), (plain, *plain_gradients), (exact, *exact_gradients), strict=True
    ):
        assert error(mine, wanted) <= 2 * error(theirs, wanted) + 1e-6


def test_rows_of_windows_by_hand():
    rows = window_rows_of(torch.tensor([0, 1, 5]), torch.tensor([3, 0, 2]))
    assert rows.tolist() == [0, 1, 2, 5, 6]


@pytest.mark.parametrize(("num_heads", "width"), [(1, 4), (2, 32), (3, 36), (2, 128)])
@pytest.mark.parametrize("name", WINDOWS)
def test_attention_inside_windows_is_as_exact_as_torch(name, num_heads, width):
    starts, lengths = make_windows(name)
    packed = torch.randn(160, 3 * width, generator=torch.Generator().manual_seed(0))
    assert_as_exact_as_torch(
        lambda packed, starts, lengths, **options: window_attention(
            packed, starts, lengths, num_heads=num_heads, **options
        ),
        packed,
        starts,
        lengths,
    )


@pytest.mark.parametrize(("num_heads", "width"), [(1, 4), (2, 32), (3, 7)])
@pytest.mark.parametrize("name", WINDOWS)
def test_pooling_of_windows_is_as_exact_as_torch(name, num_heads, width):
    starts, lengths = make_windows(name)
    generator = torch.Generator().manual_seed(0)
    rows, scores = torch.randn(160, width, generator=generator), torch.randn(160, num_heads, generator=generator)
    assert_as_exact_as_torch(pool_windows, rows, scores, starts, lengths)


def test_pooling_without_scores_is_the_mean():
    rows = torch.arange(8.0).view(4, 2).requires_grad_()
    pooled = pool_windows(rows, None, torch.tensor([0, 1, 1]), torch.tensor([2, 3, 0]))
    assert pooled.tolist() == [[[1, 2]], [[4, 5]], [[0, 0]]]
    pooled[:, 0].sum().backward()
    assert torch.allclose(rows.grad, torch.tensor([[1 / 2], [5 / 6], [1 / 3], [1 / 3]]).expand(4, 2))


def test_one_row_attends_to_itself():
    packed = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    attended = window_attention(packed, torch.arange(3), torch.ones(3, dtype=torch.int64), num_heads=2)
    torch.testing.assert_close(attended, packed[:, 16:])


@given(
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    length=st.integers(0, 20),
    num_threads=st.integers(1, 4),
)
def test_gradients_do_not_depend_on_threads(starts, length, num_threads):
    lengths = torch.tensor([(length + start) % 20 for start in starts])
    packed = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    options = {"num_heads": 2}
    with forced(threads=1):
        one = run(window_attention, packed, torch.tensor(starts), lengths, **options)
    with forced(threads=num_threads):
        many = run(window_attention, packed, torch.tensor(starts), lengths, **options)
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1][0], many[1][0])


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 2), (0, 5), (0, -1)])
def test_windows_outside_of_the_rows_are_refused(start, length):
    starts, lengths = torch.tensor([start]), torch.tensor([length])
    with pytest.raises((ValueError, RuntimeError)):
        pool_windows(torch.zeros(4, 8), None, starts, lengths)
    with pytest.raises((ValueError, RuntimeError)):
        window_attention(torch.zeros(4, 24), starts, lengths, num_heads=2, num_values=max(length, 0))


def test_shapes_that_do_not_fit_are_refused():
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="with 5 heads"):
        window_attention(torch.zeros(4, 24), one, one, num_heads=5)
    with pytest.raises(ValueError, match=r"expected \[4, heads\]"):
        pool_windows(torch.zeros(4, 8), torch.zeros(3, 2), one, one)
    with pytest.raises(ValueError, match=r"expected torch\.int64"):
        pool_windows(torch.zeros(4, 8), None, one, one.int())


@pytest.mark.parametrize("length", [5, 16, 61])
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_windows_that_shift_by_one_are_as_exact_as_windows_apart(length, spread):
    """Overlapping windows share exp(score); scores that differ by hundreds must not cost a window its digits."""
    num_windows, generator = 7, torch.Generator().manual_seed(0)
    packed = torch.randn(length + num_windows, 24, generator=generator)
    packed[0, :16] *= spread
    starts, lengths = torch.arange(num_windows), torch.full((num_windows,), length)
    shared = run(window_attention, packed, starts, lengths, num_heads=2)
    rows = window_rows_of(starts, lengths)
    apart = run(window_attention, packed[rows], starts * length, lengths, num_heads=2)
    torch.testing.assert_close(shared[0], apart[0], rtol=1e-5, atol=1e-5)
    summed = torch.zeros_like(packed).index_add_(0, rows, apart[1][0])
    torch.testing.assert_close(shared[1][0], summed, rtol=1e-4, atol=1e-4)


@given(windows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), min_size=2, max_size=12))
def test_windows_that_overlap_anyhow_are_exact_to_float32(windows):
    """What all windows of a chunk hold is summed once: it may be all of a window, a part of it, or nothing.

    Gradients of up to 12 windows meet in a row: 1e-5 of 1,500 random cases, where torch in float32 is off by 2e-6.
    """
    starts, lengths = torch.tensor(windows).T.contiguous()
    packed = torch.randn(52, 24, generator=torch.Generator().manual_seed(0))
    exact, exact_gradients = run(window_attention, packed.double(), starts, lengths, num_heads=2)
    ours, our_gradients = run(window_attention, packed, starts, lengths, num_heads=2)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(our_gradients[0].double(), exact_gradients[0], rtol=1e-5, atol=2e-5)
