"""A shorter way into torch.library ops, for tensors that hold numbers and nobody traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Setup = Callable[[Any, tuple[Any, ...], Any], None]
PLAIN = (Tensor, torch.nn.Parameter)


def shortcut(op: Any, *, setup_context: Setup | None = None, backward: Callable[..., Any] | None = None) -> Any:
    """A function that gives what `op` gives, with the same gradients.

    A call of a torch.library op passes through some ten layers of Python that look for tracers and modes: 120 us, of
    which a kernel over a few thousand rows takes 20. Plain tensors need none of it: the function that defines the op is
    called, in an autograd.Function where a gradient is wanted. Everything else (torch.compile, torch.export, fake
    tensors, gradients of an op that has none) takes the long way.
    """
    run = op._init_fn  # the function that was decorated; torch gives no public name to it

    class Shortcut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            found = run(*arguments)
            assert setup_context is not None
            setup_context(ctx, arguments, found)
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            assert backward is not None
            return backward(ctx, *gradients)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not all(type(tensor) in PLAIN for tensor in tensors):
            return op(*arguments)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return run(*arguments)
        return op(*arguments) if backward is None else Shortcut.apply(*arguments)  # type: ignore[no-untyped-call]

    return call
