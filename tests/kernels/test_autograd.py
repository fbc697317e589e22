import pytest
import torch

from kernels.expand_rows import ops
from kernels.pool_windows import ops as pool_ops
from kernels.window_attention import ops as attention_ops

ROWS = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
WINDOWS = torch.tensor([0, 1, 3]), torch.tensor([4, 4, 3])
CALLS = {
    "expand_rows": (ops, (torch.tensor([0, 5, 5, 2]), "cpu", 1)),
    "sum_rows": (ops, (torch.tensor([0, 1, 1, 3, 0, 2]), 4, "cpu", 1)),
    "pool_windows": (pool_ops, (torch.arange(12.0).view(6, 2), *WINDOWS, 1)),
    "window_attention": (attention_ops, (*WINDOWS, 2, 11, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_direct_calls_give_the_bits_and_gradients_of_the_registered_op(name):
    module, arguments = CALLS[name]
    found = []
    op = getattr(module, name)
    for call in (op.traced, op):
        rows = ROWS.clone().requires_grad_()
        out = call(rows, *arguments)
        first = out[0] if isinstance(out, tuple) else out
        first.square().sum().backward()
        with torch.no_grad():
            plain = call(rows, *arguments)
        found.append((first.detach(), rows.grad, plain[0] if isinstance(plain, tuple) else plain))
    for registered, direct in zip(*found, strict=True):
        assert torch.equal(registered, direct)


def test_direct_calls_have_second_gradients():
    rows = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inverse = torch.tensor([0, 3, 3, 1])
    assert torch.autograd.gradgradcheck(lambda rows: ops.expand_rows(rows, inverse, "cpu", 1), (rows,))


def test_an_op_without_a_second_gradient_says_so():
    rows = ROWS.clone().requires_grad_()
    out = attention_ops.window_attention(rows, *WINDOWS, 2, 11, 1)[0]
    (gradient,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="window_attention_backward"):
        gradient.sum().backward()


def test_compiled_code_holds_the_op_itself():
    def run(rows):
        return ops.expand_rows(rows, torch.tensor([0, 5, 5, 2]), "cpu", 1).sum()

    graphs = []
    torch.compile(run, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(ROWS)
    assert "recmill.expand_rows" in graphs[0].code
