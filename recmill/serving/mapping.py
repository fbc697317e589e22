"""Arrays in files, in memory or mapped, and a limit on how much of the mapped ones stays in memory."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recmill.artifacts import InputError

PAGE_BYTES = mmap.PAGESIZE


class MappedFiles:
    """Opens arrays. `is_mapped=False` reads them whole.

    The first bytes of a file, `hot_bytes`, are read when it is opened. All other pages of mapped files come into memory
    with the rows that are looked up. If mapped files then take `limit_bytes` more than at first, these pages are given
    back all at once: the operating system's cache keeps what it has room for, so that most of them return without a
    disk. Without a limit, the operating system takes pages back when it needs memory.
    """

    def __init__(self, *, is_mapped: bool, limit_bytes: int | None = None) -> None:
        self.is_mapped, self.limit_bytes = is_mapped, limit_bytes
        self.num_released = 0
        self._maps: list[tuple[mmap.mmap, int, int]] = []  # start and length of the part that is not hot
        self._first_bytes: int | None = None

    def open(self, path: Path, dtype: Any, shape: tuple[int, ...], *, hot_bytes: int = 0) -> Tensor:
        try:
            if not self.is_mapped or path.stat().st_size == 0:
                return torch.from_numpy(np.fromfile(path, dtype=dtype).reshape(shape))
            mapped = np.memmap(path, dtype=dtype, mode="r", shape=shape)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
        pages: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]
        hot_bytes = -(-min(hot_bytes, len(pages)) // PAGE_BYTES) * PAGE_BYTES
        np.frombuffer(pages, np.uint8)[:hot_bytes:PAGE_BYTES].max(initial=0)  # reads one byte of each hot page
        pages.madvise(mmap.MADV_RANDOM)  # one row needs no pages around it
        if hot_bytes < len(pages):
            self._maps.append((pages, hot_bytes, len(pages) - hot_bytes))
        with warnings.catch_warnings():  # torch has no read-only tensors; nothing here writes to a table
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(mapped)

    @property
    def cold_bytes(self) -> int:
        """Bytes of mapped files that are read when they are needed."""
        return sum(length for _, _, length in self._maps)

    def keep_limit(self) -> None:
        """Give pages back if they take more than the limit.

        Counting rows does not tell: with one row Linux maps the cached pages around it, here 50 on average.
        """
        if self.limit_bytes is None or self.cold_bytes <= self.limit_bytes:
            return
        if self._first_bytes is None:
            self._first_bytes = mapped_bytes()
        elif mapped_bytes() - self._first_bytes > self.limit_bytes:
            self.release()

    def release(self) -> None:
        """Give back all pages that are not hot; their content stays in the files."""
        self.num_released += 1
        for pages, start, length in self._maps:
            pages.madvise(mmap.MADV_DONTNEED, start, length)


def mapped_bytes() -> int:
    """Bytes of files, libraries included, that are in this process's memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[2]) * PAGE_BYTES
