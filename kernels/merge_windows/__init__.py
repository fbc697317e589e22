"""The parts of a buffer that windows cover, each once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.buffers import address_of
from kernels.jagged import pick_backend
from kernels.take_rows import take_windows
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu")


# N = values, M = values that some window covers, W = windows
def merge_windows(
    values_N: Tensor, starts_W: Tensor, lengths_W: Tensor, *, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """`(values_M, starts_W)`: what the windows cover of the values, in order, and where each of them begins there.

        values = [a, b, c, d, e, f, g, h]     windows = [f, g], [b, c, d], [c, d, e]
        gives    [b, c, d, e, f, g]           starts  = [4, 0, 1]

    Windows that overlap or touch share a part. An empty window begins at 0.
    """
    check_windows(starts_W, lengths_W)
    if pick_backend(kernel, values_N, BACKENDS) == "reference":
        from kernels.merge_windows import reference

        return reference.merge_windows(values_N, starts_W, lengths_W)
    found = starts_W.new_empty(3, len(starts_W))
    part_starts, part_lengths, new_starts_W = found
    num_parts, total = _cpu.merge_windows(
        address_of(starts_W.contiguous(), name="starts_W", dtypes=("int64",)),
        address_of(lengths_W.contiguous(), name="lengths_W", dtypes=("int64",)),
        len(starts_W),
        len(values_N),
        part_starts.data_ptr(),
        part_lengths.data_ptr(),
        new_starts_W.data_ptr(),
    )
    covered = take_windows(values_N, part_starts[:num_parts], part_lengths[:num_parts], num_values=total, num_threads=1)
    return covered, new_starts_W
