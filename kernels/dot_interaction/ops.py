"""The compiled products as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu


# B = samples, F = vectors per sample, D = their width
def multiply_stacked(vectors_BFD: Tensor, num_kept: int) -> Tensor:
    num_samples, num_vectors, width = vectors_BFD.shape
    out = vectors_BFD.new_empty(num_samples, num_kept * width + num_vectors * (num_vectors - 1) // 2)
    _cpu.dot_interaction_stacked(vectors_BFD.contiguous(), num_kept, out)
    return out


class DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_kept: int, *vectors: Tensor) -> Tensor:
        # Rows may lie apart, as columns of a wider lookup do, but the elements of a row must follow one another.
        vectors = tuple(
            own if own.stride(1) == 1 and own.stride(0) >= own.shape[1] else own.contiguous() for own in vectors
        )
        ctx.save_for_backward(*vectors)
        ctx.num_kept = num_kept
        num_samples, width = vectors[0].shape
        num_pairs = len(vectors) * (len(vectors) - 1) // 2
        out = vectors[0].new_empty(num_samples, num_kept * width + num_pairs)
        _cpu.dot_interaction(vectors, num_kept, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        vectors = ctx.saved_tensors
        found_FBD = gradient.new_empty(len(vectors), *vectors[0].shape)
        _cpu.dot_interaction_backward(vectors, ctx.num_kept, gradient.contiguous(), found_FBD)
        return None, *found_FBD.unbind()
