"""The products of every pair of a sample's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels.jagged import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu")


# B = samples, F = vectors of a sample, D = their width, P = F * (F - 1) / 2 pairs, K = vectors that go along
def dot_interaction(
    vectors: Sequence[Tensor], *, num_kept: int = 0, kernel: str | None = None, num_threads: int = 0
) -> Tensor:
    """The first `num_kept` of F vectors [B, D] as they are, then the products of every pair: [B, K * D + P].

        vectors of a sample:   a, b, c
        num_kept = 1:          [a..., b.a, c.a, c.b]

    float32 on the CPU runs compiled, and its bits do not depend on the number of threads. Everything else runs the
    reference, and so does what is traced: an exported program needs nothing of ours.
    """
    import torch

    from kernels.shortcut import PLAIN

    if not vectors or any(vector.dim() != 2 or vector.shape != vectors[0].shape for vector in vectors):
        raise ValueError(f"vectors: shapes are {[tuple(own.shape) for own in vectors]}, expected equal ones [B, D]")
    if not 0 <= num_kept <= len(vectors):
        raise ValueError(f"num_kept is {num_kept}, expected 0 to {len(vectors)}")
    backend = pick_backend(kernel, vectors[0], BACKENDS)
    is_plain = all(vector.dtype == torch.float32 and type(vector) in PLAIN for vector in vectors)
    if backend == "reference" or torch.compiler.is_compiling() or not is_plain:
        from kernels.dot_interaction import reference

        return reference.dot_interaction(vectors, num_kept=num_kept)
    from kernels.dot_interaction import function

    joined: Tensor = function.DotInteraction.apply(num_kept, num_threads, *vectors)  # type: ignore[no-untyped-call]
    return joined
