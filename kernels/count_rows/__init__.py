"""How often each row of a table is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels import _cpu
from kernels.buffers import address_of, dtype_name, size_of

if TYPE_CHECKING:
    from kernels.buffers import Array

BACKENDS = ("reference", "cpu")


# R = rows of the table
def count_rows(counts_R: Array, ids: Array, *, kernel: str | None = None, num_threads: int = 0) -> None:
    """Add to `counts_R` (int64, in place) how often each row occurs in `ids` (int64 or int32, of any shape).

    numpy arrays and torch tensors are read where they are. An id outside [0, R) raises ValueError with its position and
    leaves the counts as they were. `num_threads` 0 means: as many as OpenMP offers, where there is work enough.
    """
    if dtype_name(counts_R) != "int64":
        raise ValueError(f"counts_R: dtype is {dtype_name(counts_R)}, expected int64")
    if dtype_name(ids) not in ("int64", "int32"):
        raise ValueError(f"ids: dtype is {dtype_name(ids)}, expected int64 or int32")
    if isinstance(counts_R, np.ndarray) and not counts_R.flags.writeable:
        raise ValueError("counts_R: is read-only")
    backend = kernel or ("cpu" if isinstance(counts_R, np.ndarray) or counts_R.device.type == "cpu" else "reference")
    if backend == "reference":
        from kernels.count_rows import reference

        reference.count_rows(counts_R, ids)
    elif backend == "cpu":
        count = _cpu.count_rows_int64 if dtype_name(ids) == "int64" else _cpu.count_rows_int32
        address = address_of(ids, name="ids")
        count(address_of(counts_R, name="counts_R"), size_of(counts_R), address, size_of(ids), num_threads)
    else:
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
