"""Rows copied from one matrix to another by their numbers on either side, and the search for rows that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor


# N = rows that are moved or compared, R, H = rows of a matrix, D = width
def move_rows(
    source_RD: Tensor,
    target_HD: Tensor,
    *,
    source_rows_N: Tensor | None = None,
    target_rows_N: Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """target[target_rows[n]] = source[source_rows[n]] for every n; None means the rows 0 to N - 1.

    Takes matrices of 4-byte numbers in which the elements of a row are contiguous, or vectors (one number per row).
    Target rows must be distinct.
    """
    num_moved = _check([source_RD], [target_HD], source_rows_N, target_rows_N)
    if pick_backend(kernel, source_RD) == "reference":
        from kernels.move_rows import reference

        reference.move_rows(source_RD, target_HD, source_rows_N, target_rows_N)
        return
    _cpu.move_rows(source_RD, target_HD, source_rows_N, target_rows_N, num_moved)


def find_changed(
    held: Sequence[Tensor],
    live: Sequence[Tensor],
    *,
    held_rows_N: Tensor | None = None,
    live_rows_N: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The n, ascending, at which held[held_rows[n]] and live[live_rows[n]] differ in any bit of any pair of matrices.

    `held` and `live` are equally many matrices or vectors (weights and optimiser state), as `move_rows` takes them.
    """
    import torch

    num_compared = _check(held, live, held_rows_N, live_rows_N)
    if pick_backend(kernel, held[0]) == "reference":
        from kernels.move_rows import reference

        return reference.find_changed(held, live, held_rows_N, live_rows_N)
    found = torch.empty(num_compared, dtype=torch.int64)
    count = _cpu.find_changed(held, live, held_rows_N, live_rows_N, found)
    return found[:count]


def _check(first: Sequence[Tensor], second: Sequence[Tensor], rows_a: Tensor | None, rows_b: Tensor | None) -> int:
    """The number of rows that are moved or compared."""
    for a, b in zip(first, second, strict=True):
        if a.shape[1:] != b.shape[1:] or a.element_size() != 4 or a.dtype != b.dtype:
            raise ValueError(
                f"received {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}, "
                "expected one dtype of 4 bytes and one width"
            )
    counts = {len(rows) for rows in (rows_a, rows_b) if rows is not None}
    if rows_a is None:
        counts |= {len(a) for a in first} if rows_b is None else set()
    if len(counts) != 1:
        raise ValueError(f"received {sorted(counts)} rows, expected one number of rows on both sides")
    return counts.pop()
