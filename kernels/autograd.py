"""Compiled kernels as functions that autograd, torch.compile and torch.export know.

CPU time in us of calls with tiny inputs (torch 2.13, one core of an AMD EPYC, best of 15), forward and forward with
backward. "Addresses": kernels took integer addresses that Python had checked. "Arrays": they take nb::ndarray, imported
through DLPack's C interface (kernels/arrays.h). "Registered op": every call goes through torch.library.

                       addresses       arrays    registered op
    dedup_rows          14.0            9.5
      of 4 features     33.0           15.2
    expand_rows         11.0   94.8     5.8   77.1    14.0   124.0
    shared_lookup       28.1  117.8    12.8  120.0
    pool_windows        14.6  113.8     8.7   95.3    15.0   137.1
    window_attention    15.6  114.6     8.9   94.7    16.5   144.5

Attentions, pool_windows and dot_interaction are plain autograd.Functions: tracing uses their references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


def is_compiled_float(*tensors: Tensor) -> bool:
    """Whether compiled kernels can take these: plain float32, and nothing is tracing."""
    is_plain = all(tensor.dtype == torch.float32 and type(tensor) in PLAIN for tensor in tensors)
    return is_plain and not torch.compiler.is_compiling()


class Op:
    """A function of tensors and its gradient, also registered as the torch.library op `recmill::<name>`.

    A call of a torch.library op passes through layers of Python that look for tracers and modes. Plain tensors do not
    need them: `run` is called directly, inside of an autograd.Function if a gradient is needed. Tracing (torch.compile,
    torch.export, fake tensors) and the second derivative of an op that has none go through the registered op, `traced`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        schema: str | None = None,
        keep: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        """`fake` returns empty tensors of the right shapes; `keep(ctx, inputs, output)` saves what `backward` needs.

        `schema` describes the arguments of `run` in torch's notation; without it, they are inferred from annotations.
        """
        self.run = run
        self.traced: Any = torch.library.custom_op(f"recmill::{name}", run, mutates_args=(), schema=schema)
        self.traced.register_fake(fake)
        self._function: Any = None
        if keep is None or backward is None:
            return
        self.traced.register_autograd(backward, setup_context=keep)
        save = keep

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                output = run(*arguments)
                save(ctx, arguments, output)
                return output

        Eager.backward = staticmethod(backward)  # type: ignore[method-assign]
        self._function = Eager.apply

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.traced(*arguments)
        needs_gradient = False
        for argument in arguments:
            if isinstance(argument, Tensor):
                if type(argument) not in PLAIN:
                    return self.traced(*arguments)
                needs_gradient |= argument.requires_grad
        if not needs_gradient or not torch.is_grad_enabled():
            return self.run(*arguments)
        return self.traced(*arguments) if self._function is None else self._function(*arguments)
