import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dot_interaction
from tests.kernels.forced import forced


def vectors_of(num_vectors, num_samples, width, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_samples, width, generator=generator).to(dtype) for _ in range(num_vectors)]


def run(vectors, **options):
    """What comes out, and the gradient of each vector for a gradient that differs everywhere."""
    leaves = [vector.clone().requires_grad_() for vector in vectors]
    out = dot_interaction(leaves, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_products_follow_the_vectors_that_go_along(kernel):
    a, b, c = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    assert dot_interaction([a, b, c], num_kept=1, kernel=kernel).tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0]]
    assert dot_interaction([a, b, c], kernel=kernel).tolist() == [[11.0, 17.0, 39.0]]


@given(
    num_vectors=st.integers(1, 20),
    num_samples=st.integers(0, 9),
    width=st.sampled_from([1, 3, 7, 8, 9, 16, 20, 33]),
    share_kept=st.sampled_from([0.0, 0.5, 1.0]),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=120, deadline=None)
def test_values_and_gradients_are_as_close_to_float64_as_those_of_torch(
    num_vectors, num_samples, width, share_kept, num_threads
):
    vectors, num_kept = vectors_of(num_vectors, num_samples, width), int(share_kept * num_vectors)
    exact_out, exact = run([vector.double() for vector in vectors], num_kept=num_kept)
    torch_out, by_torch = run(vectors, num_kept=num_kept, kernel="reference")
    with forced(threads=num_threads):
        out, found = run(vectors, num_kept=num_kept)
    assert [own.shape for own in (out, *found)] == [own.shape for own in (exact_out, *exact)]
    flat, flat_torch, flat_exact = (
        torch.cat([own.flatten() for own in side])
        for side in ((out, *found), (torch_out, *by_torch), (exact_out, *exact))
    )
    if len(flat):
        # Sums of up to 20 terms of size 1: one rounding of such a sum is 1e-6.
        assert (flat - flat_exact).abs().max() <= 2 * (flat_torch - flat_exact).abs().max() + 1e-6


def test_any_number_of_threads_gives_the_same_bits():
    vectors = vectors_of(11, 301, 16)
    with forced(threads=1):
        one, one_gradients = run(vectors, num_kept=1)
    with forced(threads=3):
        three, three_gradients = run(vectors, num_kept=1)
    assert torch.equal(one, three)
    assert all(torch.equal(a, b) for a, b in zip(one_gradients, three_gradients, strict=True))


def test_columns_of_a_wider_lookup_need_no_copy():
    wide = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    vectors = [wide[:, :8], wide[:, 16:], wide[:, 8:16], wide[:, ::3], wide[:1, :8].expand(5, 8)]
    out = dot_interaction(vectors, num_kept=2)
    out.square().sum().backward()
    found, wide.grad = wide.grad, None
    expected = dot_interaction(vectors, num_kept=2, kernel="reference")
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wide.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 2, 8), (2, 1, 3), (2, 0, 3)])
def test_vectors_in_one_tensor_give_the_same_bits(shape):
    stacked = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    num_kept = min(1, shape[1])
    found = dot_interaction(stacked, num_kept=num_kept)
    if shape[1]:
        assert torch.equal(found, dot_interaction(stacked.unbind(1), num_kept=num_kept))
        assert torch.equal(found, dot_interaction(stacked.clone().requires_grad_(), num_kept=num_kept))
    assert found.shape == (shape[0], num_kept * shape[2] + shape[1] * (shape[1] - 1) // 2)


def test_gradients_are_those_of_the_formula():
    vectors = [vector.requires_grad_() for vector in vectors_of(4, 3, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *own: dot_interaction(own, num_kept=2), vectors)


def test_an_exported_program_has_torchs_own_operators_only():
    class Model(torch.nn.Module):
        def forward(self, a, b):
            return dot_interaction([a, b], num_kept=1)

    program = torch.export.export(Model(), (torch.ones(3, 4), torch.ones(3, 4)))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.bmm.default" in called
    assert not any(name.startswith("recmill") for name in called)


def test_vectors_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shapes are \[\(2, 3\), \(2, 4\)\]"):
        dot_interaction([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(ValueError, match="num_kept is 3"):
        dot_interaction([torch.ones(2, 3)], num_kept=3)
