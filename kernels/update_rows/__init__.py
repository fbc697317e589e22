"""One optimiser step of the rows that a batch reads: which rows, the sums of their gradients, the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

OPTIMISERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2}


# F = features, B = bags per feature, N = ids, H = rows of all tables, U = distinct rows of the ids, D = width
def find_rows(
    ids_N: Tensor, edges_F: Tensor, bases_F: Tensor, *, num_rows: int, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """The distinct rows that were looked up, ascending, and the place of every id among them: both int32.

    Feature f has the ids [edges[f], edges[f + 1]), and its table begins at row bases[f] of all `num_rows` rows.
    """
    import torch

    if len(edges_F) != len(bases_F) + 1:
        raise ValueError(f"received {len(edges_F)} edges of {len(bases_F)} features, expected one more than features")
    if pick_backend(kernel, ids_N) == "reference":
        from kernels.update_rows import reference

        return reference.find_rows(ids_N, edges_F, bases_F)
    rows = torch.empty(min(len(ids_N), num_rows), dtype=torch.int32)
    inverse_N = torch.empty(len(ids_N), dtype=torch.int32)
    count = _cpu.find_rows(ids_N, edges_F, bases_F, num_rows, rows, inverse_N)
    return rows[:count], inverse_N


def sum_bags(
    gradients: Sequence[Tensor],
    offsets: Tensor | None,
    inverse_N: Tensor,
    *,
    out: Tensor,
    is_mean: bool = False,
    kernel: str | None = None,
) -> None:
    """Fill `out` [U, D] with the gradients of the bags [B, D] of all features, added up by row.

    Id n, of row `inverse_N[n]`, is in bag b of feature f if offsets[f * B + b] <= n < offsets[f * B + b + 1]; without
    `offsets` each bag has one id. With `is_mean` a bag's gradient is divided by its length. The result does not depend
    on the number of threads.
    """
    num_bags, width = gradients[0].shape
    if any(own.shape != (num_bags, width) for own in gradients) or out.shape[1:] != (width,):
        shapes = [tuple(own.shape) for own in [*gradients, out]]
        raise ValueError(f"received gradients and sums of shapes {shapes}, expected one shape and one width")
    ends = len(inverse_N) + 1 if offsets is None else len(offsets)
    if ends != len(gradients) * num_bags + 1:
        raise ValueError(f"received {ends} ends of bags, expected {len(gradients)} * {num_bags} + 1")
    if pick_backend(kernel, out) == "reference":
        from kernels.update_rows import reference

        reference.sum_bags(gradients, offsets, inverse_N, is_mean=is_mean, out=out)
        return
    # Gradients that are columns of a wide tensor are read in place; only expanded ones (of a sum, say) are copied.
    laid_out = [own if own.stride(1) == 1 else own.contiguous() for own in gradients]
    _cpu.sum_bags(laid_out, offsets, inverse_N, is_mean, out)


def update_rows(
    weights_HD: Tensor,
    state: Tensor | None,
    blocks: Sequence[tuple[Tensor, Tensor]],
    *,
    optimiser: str,
    lr: float,
    eps: float = 0.0,
    scale: float = 1.0,
    kernel: str | None = None,
) -> None:
    """One optimiser step of the rows in `blocks`, each of which is (int32 rows, their gradients [rows, D]).

    Gradients of the same row are added in the order of the blocks and multiplied by `scale`. The result does not depend
    on the number of threads. `state` is the state of Adagrad [H, D] or of row-wise Adagrad [H]; SGD has none.
    """
    if optimiser not in OPTIMISERS:
        raise ValueError(f"optimiser is {optimiser!r}, expected one of {', '.join(OPTIMISERS)}")
    num_rows, width = weights_HD.shape
    expected = {"sgd": None, "adagrad": (num_rows, width), "rowwise_adagrad": (num_rows,)}[optimiser]
    received = None if state is None else tuple(state.shape)
    if received != expected:
        raise ValueError(f"state: shape is {received}, expected {expected} for {optimiser}")
    for rows, gradient in blocks:
        if gradient.shape != (len(rows), width):
            raise ValueError(f"received {len(rows)} rows of width {width} and gradients {tuple(gradient.shape)}")
    if pick_backend(kernel, weights_HD) == "reference":
        from kernels.update_rows import reference

        reference.update_rows(weights_HD, state, blocks, optimiser=optimiser, lr=lr, eps=eps, scale=scale)
        return
    settings = (OPTIMISERS[optimiser], lr, eps, scale)
    _cpu.update_rows(weights_HD, state, *settings, [own for own, _ in blocks], [own for _, own in blocks])
