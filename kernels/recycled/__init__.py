"""Arrays in memory that earlier ones have used, for row groups and batches, and the times of a worker thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import _cpu

MIN_RECYCLED_BYTES = 65_536


def recycled_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array, in memory that is used again unless it is small (recycler.h)."""
    num_bytes = (shape if isinstance(shape, int) else math.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_RECYCLED_BYTES:
        return np.empty(shape, dtype)
    return np.frombuffer(_cpu.allocate(num_bytes), dtype).reshape(shape)


def recycled_arrays(kinds: Sequence[tuple[int | tuple[int, ...], npt.DTypeLike]]) -> list[npt.NDArray[Any]]:
    """Uninitialised arrays of these shapes and dtypes in one piece of memory."""
    shapes = [((shape,) if isinstance(shape, int) else shape, np.dtype(dtype)) for shape, dtype in kinds]
    counts = [math.prod(shape) for shape, _ in shapes]
    ends = list(accumulate(-(-count * own.itemsize // 64) * 64 for count, (_, own) in zip(counts, shapes, strict=True)))
    piece = recycled_array(ends[-1], np.uint8)
    return [
        np.frombuffer(piece, own, count, begin).reshape(shape)
        for (shape, own), count, begin in zip(shapes, counts, [0, *ends], strict=False)
    ]


def release_idle() -> int:
    """Return memory that no array uses to the operating system; returns the number of bytes."""
    return _cpu.release_idle()


def thread_times() -> tuple[float, float, float]:
    """Seconds of the wall clock (from any start), on a core, and runnable without a core (0 where it is not reported).

    One call: time.perf_counter, time.thread_time and a read of /proc release the GIL twice. The third number is only
    looked up if the thread spent over 5% of the time since its last call without a core.
    """
    return _cpu.thread_times()
