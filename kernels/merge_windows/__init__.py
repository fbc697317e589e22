"""The parts of arrays that windows cover, each once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.buffers import empty_array

IdArray = npt.NDArray[np.int64]
WindowSource = tuple[IdArray, IdArray, npt.NDArray[np.int32]]  # values, and starts and lengths of windows into them


# M = values that some window covers, W = windows of all sources
def merge_windows(sources: Sequence[WindowSource], *, kernel: str | None = None) -> tuple[IdArray, IdArray]:
    """`(values_M, starts_W)`: the values that windows cover, source by source, and where each window begins there.

        values = [a, b, c, d, e, f, g, h]     windows = [f, g], [b, c, d], [c, d, e]
        gives    [b, c, d, e, f, g]           starts  = [4, 0, 1]

    Windows that overlap or touch share a part. An empty window begins at 0.
    """
    if pick_backend(kernel, None) == "reference":
        from kernels.merge_windows import reference

        return reference.merge_windows(sources)
    values, starts, lengths = ([source[position] for source in sources] for position in range(3))
    num_windows = sum(map(len, starts))
    parts, new_starts_W = np.empty(3 * num_windows, dtype=np.int64), np.empty(num_windows, dtype=np.int64)
    num_parts, total = _cpu.merge_windows(values, starts, lengths, parts, new_starts_W)
    values_M = empty_array(total, np.int64)
    _cpu.copy_parts(values, parts, num_parts, values_M)
    return values_M, new_starts_W
