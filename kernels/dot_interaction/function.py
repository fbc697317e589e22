"""The compiled products as a function that autograd knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.buffers import address_of


class DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_kept: int, num_threads: int, *vectors: Tensor) -> Tensor:
        vectors = tuple(_with_whole_rows(vector) for vector in vectors)
        ctx.save_for_backward(*vectors)
        ctx.num_kept, ctx.num_threads = num_kept, num_threads
        num_samples, width = vectors[0].shape
        num_pairs = len(vectors) * (len(vectors) - 1) // 2
        out = vectors[0].new_empty(num_samples, num_kept * width + num_pairs)
        _cpu.dot_interaction(_describe(vectors), num_samples, width, num_kept, out.data_ptr(), num_threads)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        vectors, gradient = ctx.saved_tensors, gradient.contiguous()
        num_samples, width = vectors[0].shape
        found_FBD = gradient.new_empty(len(vectors), num_samples, width)
        _cpu.dot_interaction_backward(
            _describe(vectors),
            num_samples,
            width,
            ctx.num_kept,
            address_of(gradient, name="gradient", dtypes=("float32",)),
            found_FBD.data_ptr(),
            ctx.num_threads,
        )
        return None, None, *found_FBD.unbind()


def _with_whole_rows(vector: Tensor) -> Tensor:
    """Rows may lie apart, as columns of a wider lookup do, but each of them lies whole."""
    return vector if vector.stride(1) == 1 and vector.stride(0) >= vector.shape[1] else vector.contiguous()


def _describe(vectors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Of each vector: its address, and the floats from one sample to the next."""
    return [(vector.data_ptr(), vector.stride(0)) for vector in vectors]
