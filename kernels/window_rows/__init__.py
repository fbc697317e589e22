"""Lists that shift, as windows into one shared buffer."""

from __future__ import annotations

import numpy as np

from kernels import _cpu
from kernels.backends import call_in_torch, count_jagged_rows, pick_backend
from kernels.buffers import OfOneKind, empty_like_kind
from kernels.take_rows import take_windows


# B = rows, N = values of the buffer
def window_rows(
    values: OfOneKind, offsets: OfOneKind, *, weights: OfOneKind | None = None, kernel: str | None = None
) -> tuple[OfOneKind, OfOneKind | None, OfOneKind]:
    """A buffer in which every list is a window: `(buffer_N, weights_N, starts_B)`; lengths do not change.

        lists:   [a, b, c, d]  [b, c, d, e]  [x]  []
        buffer = [a, b, c, d, e, x]
        starts = [0, 1, 5, 6]

    Each list overlaps the end of the buffer as far as it agrees with the previous list. Histories that grow at the
    front overlap when read last to first: that order is tried too unless the first order halves the values, and the
    shorter buffer is kept.
    """
    columns = [values] if weights is None else [values, weights]
    num_rows = count_jagged_rows(columns, [offsets] * len(columns))
    backend = pick_backend(kernel, values)
    starts_B, added_B = _find_windows(columns, offsets, backend, reverse=False)
    total = int(offsets[-1] - offsets[0])
    is_reverse = False
    if num_rows and 2 * int(added_B.sum()) > total:
        other_starts_B, other_added_B = _find_windows(columns, offsets, backend, reverse=True)
        if int(other_added_B.sum()) < int(added_B.sum()):
            starts_B, added_B, is_reverse = other_starts_B, other_added_B, True
    ends_B = offsets[1:]
    if is_reverse:
        ends_B, added_B = _reversed(ends_B), _reversed(added_B)
    sources_B = ends_B - added_B
    buffers = [take_windows(column, sources_B, added_B, kernel=kernel) for column in columns]
    return buffers[0], buffers[1] if weights is not None else None, starts_B


def _find_windows(
    columns: list[OfOneKind], offsets: OfOneKind, backend: str, *, reverse: bool
) -> tuple[OfOneKind, OfOneKind]:
    if backend == "reference":
        from kernels.window_rows import reference

        return call_in_torch(reference.find_windows, columns, offsets, reverse=reverse)  # type: ignore[no-any-return]
    starts_B, added_B = (empty_like_kind(offsets, len(offsets) - 1, is_index=True) for _ in range(2))
    _cpu.window_rows(columns, offsets, starts_B, added_B, reverse)
    return starts_B, added_B


def _reversed(array: OfOneKind) -> OfOneKind:
    return np.ascontiguousarray(array[::-1]) if isinstance(array, np.ndarray) else array.flip(0)
