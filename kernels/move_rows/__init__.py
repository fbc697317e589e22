"""Rows that go from one matrix to another, by their numbers on either side, and the search for those that need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.buffers import address_of
from kernels.jagged import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu")


# N = rows that are moved or compared, R, H = rows of a matrix, D = width
def move_rows(
    source_RD: Tensor,
    target_HD: Tensor,
    *,
    source_rows_N: Tensor | None = None,
    target_rows_N: Tensor | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> None:
    """target[target_rows[n]] = source[source_rows[n]] for every n; None means the rows 0 to N - 1.

    Matrices of 4-byte numbers whose rows are in one piece each, or vectors (one number a row). Target rows must be
    distinct.
    """
    num_moved = _check([source_RD], [target_HD], source_rows_N, target_rows_N)
    if pick_backend(kernel, source_RD, BACKENDS) == "reference":
        from kernels.move_rows import reference

        reference.move_rows(source_RD, target_HD, source_rows_N, target_rows_N)
        return
    _cpu.move_rows(
        _describe(source_RD, "source_RD"),
        _describe(target_HD, "target_HD"),
        _address(source_rows_N, "source_rows_N"),
        _address(target_rows_N, "target_rows_N"),
        num_moved,
        num_threads,
    )


def find_changed(
    held: Sequence[Tensor],
    live: Sequence[Tensor],
    *,
    held_rows_N: Tensor | None = None,
    live_rows_N: Tensor | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> Tensor:
    """The n, ascending, where held[held_rows[n]] and live[live_rows[n]] differ in a bit; pairs of matrices together.

    `held` and `live` are as many matrices or vectors each (weights and optimiser state), as `move_rows` takes them.
    """
    import torch

    num_compared = _check(held, live, held_rows_N, live_rows_N)
    if pick_backend(kernel, held[0], BACKENDS) == "reference":
        from kernels.move_rows import reference

        return reference.find_changed(held, live, held_rows_N, live_rows_N)
    found = torch.empty(num_compared, dtype=torch.int64)
    count = _cpu.find_changed(
        [(_describe(a, "held"), _describe(b, "live")) for a, b in zip(held, live, strict=True)],
        _address(held_rows_N, "held_rows_N"),
        _address(live_rows_N, "live_rows_N"),
        num_compared,
        found.data_ptr(),
        num_threads,
    )
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


def _describe(matrix: Tensor, name: str) -> tuple[int, int, int, int]:
    """(address, rows, floats of a row, floats from one row to the next)."""
    if matrix.device.type != "cpu":
        raise ValueError(f"{name}: is on {matrix.device}, the CPU kernel wants it on the CPU")
    if matrix.dim() > 2 or (matrix.dim() == 2 and matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"{name}: expected a vector, or a matrix whose rows are in one piece each")
    width = matrix.shape[1] if matrix.dim() == 2 else 1
    return matrix.data_ptr(), len(matrix), width, matrix.stride(0)


def _address(rows: Tensor | None, name: str) -> int:
    return 0 if rows is None else address_of(rows, name=name, dtypes=("int64",))
