"""Linear layers with ReLU between them, in one call without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor


class DenseLayers:
    """The weights of some layers, packed once and used for every batch."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]], *, ends_with_relu: bool = False) -> None:
        """`layers` are weights [outputs, inputs] and biases."""
        self.layers, self.ends_with_relu = tuple(layers), ends_with_relu
        self.num_outputs = len(self.layers[-1][0])
        self.compiled = _cpu.DenseLayers(
            [weight.contiguous() for weight, _ in layers],
            [None if bias is None else bias.contiguous() for _, bias in layers],
            ends_with_relu,
        )


# N = rows, K = inputs, O = outputs of the first layer, R = rows that it may start from
def dense_layers(
    layers: DenseLayers,
    x_NK: Tensor,
    *,
    start_RO: Tensor | None = None,
    start_N: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The results of the last layer for every row.

    With `start_RO`, the sums of the first layer start from row start_N[n] of it in place of the bias; with one row,
    `start_N` may be left out. The bits of a result depend neither on other rows nor on the number of threads.
    """
    if pick_backend(kernel, x_NK) == "reference":
        from kernels.dense_layers import reference

        return reference.dense_layers(layers, x_NK, start_RO, start_N)
    out = x_NK.new_empty(len(x_NK), layers.num_outputs)
    _cpu.dense_layers(layers.compiled, x_NK.contiguous(), start_RO, start_N, out)
    return out
