"""The products of every pair of a sample's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor


# B = samples, F = vectors per sample, D = their width, P = F * (F - 1) / 2 pairs, K = vectors that are kept
def dot_interaction(vectors: Sequence[Tensor] | Tensor, *, num_kept: int = 0, kernel: str | None = None) -> Tensor:
    """The first `num_kept` of F vectors [B, D] unchanged, then the products of every pair: [B, K * D + P].

    The vectors may also be one tensor [B, F, D], which spares a call without gradients the work on F of them.

        vectors of a sample:   a, b, c
        num_kept = 1:          [a..., b.a, c.a, c.b]

    float32 on the CPU runs compiled, and its bits do not depend on the number of threads. All other tensors use the
    reference, and so does tracing: an exported program contains only torch's own operators.
    """
    from kernels.autograd import is_compiled_float

    if not isinstance(vectors, list | tuple):
        stacked_BFD: Tensor = vectors  # type: ignore[assignment]
        is_compiled = pick_backend(kernel, stacked_BFD) == "cpu" and is_compiled_float(stacked_BFD)
        if is_compiled and stacked_BFD.dim() == 3 and not stacked_BFD.requires_grad:
            from kernels.dot_interaction import ops

            return ops.multiply_stacked(stacked_BFD, num_kept)
        vectors = stacked_BFD.unbind(1)
    if not vectors or any(vector.dim() != 2 or vector.shape != vectors[0].shape for vector in vectors):
        raise ValueError(f"vectors: shapes are {[tuple(own.shape) for own in vectors]}, expected equal ones [B, D]")
    if not 0 <= num_kept <= len(vectors):
        raise ValueError(f"num_kept is {num_kept}, expected 0 to {len(vectors)}")
    if pick_backend(kernel, vectors[0]) == "reference" or not is_compiled_float(*vectors):
        from kernels.dot_interaction import reference

        return reference.dot_interaction(vectors, num_kept=num_kept)
    from kernels.dot_interaction import ops

    joined: Tensor = ops.DotInteraction.apply(num_kept, *vectors)  # type: ignore[no-untyped-call]
    return joined
