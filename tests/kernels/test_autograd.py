import pytest
import torch

from kernels import window_attention
from kernels.expand_rows import ops

ROWS = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
WINDOWS = torch.tensor([0, 1, 3]), torch.tensor([4, 4, 3])
CALLS = {
    "expand_rows": (torch.tensor([0, 5, 5, 2]), "cpu"),
    "sum_rows": (torch.tensor([0, 1, 1, 3, 0, 2]), 4, "cpu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_direct_calls_give_the_bits_and_gradients_of_the_registered_op(name):
    arguments, op = CALLS[name], getattr(ops, name)
    found = []
    for call in (op.traced, op):
        rows = ROWS.clone().requires_grad_()
        out = call(rows, *arguments)
        out.square().sum().backward()
        with torch.no_grad():
            found.append((out.detach(), rows.grad, call(rows, *arguments)))
    for registered, direct in zip(*found, strict=True):
        assert torch.equal(registered, direct)


def test_direct_calls_have_second_gradients():
    rows = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inverse = torch.tensor([0, 3, 3, 1])
    assert torch.autograd.gradgradcheck(lambda rows: ops.expand_rows(rows, inverse, "cpu"), (rows,))


def test_an_op_without_a_second_gradient_says_so():
    rows = ROWS.clone().requires_grad_()
    out = window_attention(rows, *WINDOWS, num_heads=2)
    (gradient,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_compiled_code_holds_the_op_itself():
    def run(rows):
        return ops.expand_rows(rows, torch.tensor([0, 5, 5, 2]), "cpu").sum()

    graphs = []
    torch.compile(run, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(ROWS)
    assert "recmill.expand_rows" in graphs[0].code
