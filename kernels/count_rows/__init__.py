"""How often each row of a table is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels import _cpu
from kernels.backends import pick_backend

if TYPE_CHECKING:
    from kernels.buffers import Array


# R = rows of the table
def count_rows(counts_R: Array, ids: Array, *, kernel: str | None = None) -> None:
    """Add to `counts_R` (int64, in place) how often each row occurs in `ids` (int64 or int32, of any shape).

    numpy arrays and torch tensors are read in place. An id outside [0, R) raises ValueError with its position and
    leaves the counts unchanged.
    """
    if isinstance(counts_R, np.ndarray) and not counts_R.flags.writeable:
        raise ValueError("counts_R: is read-only")
    if pick_backend(kernel, counts_R) == "reference":
        from kernels.count_rows import reference

        reference.count_rows(counts_R, ids)
    else:
        _cpu.count_rows(counts_R, ids)
