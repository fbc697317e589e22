"""One optimiser step of the rows that a batch reads: which rows, the sums of their gradients, the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.buffers import address_of
from kernels.jagged import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu")
OPTIMISERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2}


# F = features, B = bags a feature, N = ids, H = rows of all tables, U = distinct rows of the ids, D = width
def find_rows(
    ids_N: Tensor, edges_F: Tensor, bases_F: Tensor, *, num_rows: int, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """The distinct rows that were looked up, ascending, and for every id its place among them: both int32.

    Feature f has the ids [edges[f], edges[f + 1]) and its table begins at row bases[f] of all `num_rows` rows.
    """
    import torch

    if len(edges_F) != len(bases_F) + 1:
        raise ValueError(f"received {len(edges_F)} edges of {len(bases_F)} features, expected one more than features")
    if pick_backend(kernel, ids_N, BACKENDS) == "reference":
        from kernels.update_rows import reference

        return reference.find_rows(ids_N, edges_F, bases_F)
    rows = torch.empty(min(len(ids_N), num_rows), dtype=torch.int32)
    inverse_N = torch.empty(len(ids_N), dtype=torch.int32)
    count = (_cpu.find_rows_int32 if ids_N.dtype == torch.int32 else _cpu.find_rows_int64)(
        address_of(ids_N, name="ids_N", dtypes=("int64", "int32")),
        len(ids_N),
        address_of(edges_F, name="edges_F", dtypes=("int64",)),
        address_of(bases_F, name="bases_F", dtypes=("int64",)),
        len(bases_F),
        num_rows,
        rows.data_ptr(),
        inverse_N.data_ptr(),
    )
    return rows[:count], inverse_N


def sum_bags(
    gradients: Sequence[Tensor],
    offsets: Tensor | None,
    inverse_N: Tensor,
    *,
    out: Tensor,
    is_mean: bool = False,
    kernel: str | None = None,
    num_threads: int = 0,
) -> None:
    """Fills `out` [U, D] with the gradients of the bags [B, D] of every feature, added up by row.

    Id n, of row `inverse_N[n]`, lies in bag b of feature f if offsets[f * B + b] <= n < offsets[f * B + b + 1]; with no
    `offsets` each bag has one id. With `is_mean` a bag's gradient is divided by its length. The result is the same for
    any number of threads.
    """
    num_bags, width = gradients[0].shape
    if any(own.shape != (num_bags, width) for own in gradients) or out.shape[1:] != (width,):
        shapes = [tuple(own.shape) for own in [*gradients, out]]
        raise ValueError(f"received gradients and sums of shapes {shapes}, expected one shape and one width")
    ends = len(inverse_N) + 1 if offsets is None else len(offsets)
    if ends != len(gradients) * num_bags + 1:
        raise ValueError(f"received {ends} ends of bags, expected {len(gradients)} * {num_bags} + 1")
    if pick_backend(kernel, out, BACKENDS) == "reference":
        from kernels.update_rows import reference

        reference.sum_bags(gradients, offsets, inverse_N, is_mean=is_mean, out=out)
        return
    # Gradients of one wide tensor are read where they lie; only expanded ones (of a sum, say) are copied.
    laid_out = [own if own.stride(1) == 1 else own.contiguous() for own in gradients]
    if any(str(own.dtype) != "torch.float32" or own.device.type != "cpu" for own in laid_out):
        raise ValueError("gradients: expected float32 on the CPU")
    _cpu.sum_bags(
        [(own.data_ptr(), own.stride(0)) for own in laid_out],
        0 if offsets is None else address_of(offsets, name="offsets", dtypes=("int64",)),
        address_of(inverse_N, name="inverse_N", dtypes=("int32",)),
        len(inverse_N),
        num_bags,
        width,
        is_mean,
        address_of(out, name="out", dtypes=("float32",)),
        len(out),
        num_threads,
    )


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
    num_threads: int = 0,
) -> None:
    """One optimiser step of the rows in `blocks`, each of them (int32 rows, their gradients [rows, D]).

    Gradients of the same row are added in the order of the blocks and multiplied by `scale`; the result is the same
    for any number of threads. `state` is what Adagrad keeps, [H, D], or row-wise Adagrad, [H]; SGD has none.
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
    if pick_backend(kernel, weights_HD, BACKENDS) == "reference":
        from kernels.update_rows import reference

        reference.update_rows(weights_HD, state, blocks, optimiser=optimiser, lr=lr, eps=eps, scale=scale)
        return
    described = [
        (
            address_of(rows, name="rows", dtypes=("int32",)),
            address_of(gradient, name="gradient", dtypes=("float32",)),
            len(rows),
        )
        for rows, gradient in blocks
    ]
    _cpu.update_rows(
        address_of(weights_HD, name="weights_HD", dtypes=("float32",)),
        0 if state is None else address_of(state, name="state", dtypes=("float32",)),
        num_rows,
        width,
        OPTIMISERS[optimiser],
        lr,
        eps,
        scale,
        described,
        num_threads,
    )
