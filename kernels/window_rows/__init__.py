"""Lists that shift, as windows into one shared buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import count_jagged_rows, pick_backend
from kernels.take_rows import take_windows

if TYPE_CHECKING:
    from torch import Tensor


# B = rows, N = values of the buffer
def window_rows(
    values: Tensor, offsets: Tensor, *, weights: Tensor | None = None, kernel: str | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
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
    if pick_backend(kernel, values) == "reference" or values.device.type != "cpu":
        from kernels.window_rows import reference

        find_windows = reference.find_windows
    else:
        find_windows = _find_windows_on_cpu
    starts_B, added_B = find_windows(columns, offsets, reverse=False)
    total = int(offsets[-1] - offsets[0])
    is_reverse = False
    if num_rows and 2 * int(added_B.sum()) > total:
        other_starts_B, other_added_B = find_windows(columns, offsets, reverse=True)
        if int(other_added_B.sum()) < int(added_B.sum()):
            starts_B, added_B, is_reverse = other_starts_B, other_added_B, True
    ends_B = offsets[1:]
    if is_reverse:
        ends_B, added_B = ends_B.flip(0), added_B.flip(0)
    sources_B = (ends_B - added_B).contiguous()
    buffers = [take_windows(column, sources_B, added_B, kernel=kernel) for column in columns]
    return buffers[0], buffers[1] if weights is not None else None, starts_B


def _find_windows_on_cpu(columns: list[Tensor], offsets: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    starts_B, added_B = offsets.new_empty(len(offsets) - 1), offsets.new_empty(len(offsets) - 1)
    _cpu.window_rows(columns, offsets, starts_B, added_B, reverse)
    return starts_B, added_B
