"""Divides the memory limit of clustering among the steps that need memory.

The limit bounds how much the process grows. DuckDB reads the log and returns its rows before the first key range is
loaded, sorted and cut into row groups (cluster/range_sort.py, storage/writer.py). Libraries that are not loaded yet,
above all torch, count towards the limit where it leaves room for them; otherwise the process grows beyond it by them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass

import pyarrow as pa

from recmill.artifacts import InputError
from recmill.data.log import RawLog

SAMPLE_ROWS = 32_768  # they show how much the features repeat
MAX_BATCH_ROWS = 32_768
MIN_BATCH_ROWS = 512
MIN_ROWS_PER_GROUP = 1_024
# Copies of a row group's rows while it is cut and written (measured on `recd`: 2.7), and copies of the sample.
COPIES = {"time": 3, "session": 3, "deduplicated": 4}
SAMPLE_COPIES = 5
# Shared histories are packed for the footer when a part is closed; they get an eighth of the memory that is left.
MAX_SHARED_IDS = 4_000_000  # 32 MB in a reader of the part
SHARED_ID_BYTES = 8 * 40
# How much the process grows when it loads these (pandas for Arrow's numbers, torch for the deduplicated layout) and
# opens its first connection.
LIBRARY_BYTES = {"pandas": 40_000_000, "torch": 200_000_000, "ibis.backends.duckdb": 65_000_000}
# Freed memory that Arrow's pool and the C library keep in any case, and what DuckDB takes beyond its own limit while it
# reads: with 50 MB for both, 2 of 11 runs grew by up to 21 MB more than a limit of 250 MB.
KEPT_BYTES = 75_000_000
# One DuckDB thread holds a page of each column and 2048 rows (44 MB for 33 columns and rows of 3 kB).
PAGE_BYTES = 1_200_000
VECTOR_ROWS = 2_048
MIN_DUCKDB_BYTES = 24_000_000
MAX_DUCKDB_BYTES = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes that keep clustering inside its limit."""

    rows_per_group: int
    batch_rows: int  # per batch of the streams into and out of the sort
    sample_rows: int
    duckdb_bytes: int  # DuckDB's own limit
    range_bytes: int  # of rows that are sorted at a time
    max_shared_ids: int  # in the histories of a part's footer
    least_bytes: int  # no smaller limit can be met

    @classmethod
    def of(
        cls,
        log: RawLog,
        *,
        layout: str,
        limit_bytes: int,
        rows_per_group: int | None,
        rows_per_part: int,
        loaded: frozenset[str],
    ) -> MemoryPlan:
        """Keeps a given `rows_per_group`; otherwise takes the default, or what the limit allows.

        `loaded` are the libraries that were loaded when the limit began to count.
        """
        row_bytes, copies = log.row_bytes, COPIES[layout]
        reading = max(MIN_DUCKDB_BYTES, PAGE_BYTES * len(log.schema.columns) + 3 * VECTOR_ROWS * row_bytes)
        usual = min(default_rows_per_group(layout, log.num_rows), rows_per_part)
        least_rows = min(usual, MIN_ROWS_PER_GROUP) if rows_per_group is None else min(rows_per_group, log.num_rows)
        # Two thirds are for the rows that are sorted, one third for row groups, whose batches add half.
        least = max(reading + 3 * MIN_BATCH_ROWS * row_bytes, 9 * copies * least_rows * row_bytes // 2)
        # What decides about the files must not depend on which libraries are loaded already.
        spare = limit_bytes - KEPT_BYTES
        left = max(spare - library_bytes(layout, loaded=loaded), least)
        fresh = max(spare - library_bytes(layout, loaded=frozenset()), least)
        if rows_per_group is None:
            rows_per_group = max(min(usual, fresh * 2 // (9 * copies * row_bytes)), least_rows)
        batch_rows = max(MIN_BATCH_ROWS, min(MAX_BATCH_ROWS, rows_per_group // 2))
        held_bytes = copies * min(rows_per_group + batch_rows, log.num_rows) * row_bytes
        most = SAMPLE_ROWS if layout == "deduplicated" else SAMPLE_ROWS // 4
        return cls(
            rows_per_group=rows_per_group,
            batch_rows=batch_rows,
            sample_rows=min(most, max(MIN_ROWS_PER_GROUP, fresh // (2 * SAMPLE_COPIES * row_bytes))),
            duckdb_bytes=min(max(left // 2, reading), MAX_DUCKDB_BYTES),
            range_bytes=max((left - held_bytes) // 3, row_bytes),
            max_shared_ids=min(MAX_SHARED_IDS, max(fresh // SHARED_ID_BYTES, 1)),
            least_bytes=KEPT_BYTES + least,
        )

    def check(self, limit_bytes: int, *, layout: str) -> None:
        """Raise InputError for a limit that cannot be met."""
        if limit_bytes < self.least_bytes:
            raise InputError(
                f"{limit_bytes:,} bytes of memory are too few for this log and layout {layout!r}, expected at least "
                f"{self.least_bytes:,}; raise --memory-limit"
            )


def loaded_libraries() -> frozenset[str]:
    """Those of LIBRARY_BYTES that this process has loaded."""
    return frozenset(LIBRARY_BYTES).intersection(sys.modules)


def library_bytes(layout: str, *, loaded: frozenset[str]) -> int:
    """How much a process that has loaded these grows to load the others that a layout needs."""
    return sum(
        size
        for name, size in LIBRARY_BYTES.items()
        if name not in loaded and (name != "torch" or layout == "deduplicated")
    )


class LeanArrow:
    """While any thread is inside, Arrow allocates from the C library, which returns freed memory to the system.

    Arrow's own pools keep it: mimalloc kept 55 MB of a log of 50 MB after all of it was freed and released.
    """

    _lock, _num_inside = threading.Lock(), 0
    _before: pa.MemoryPool | None = None

    def __enter__(self) -> None:
        with LeanArrow._lock:
            if LeanArrow._num_inside == 0:
                LeanArrow._before = pa.default_memory_pool()
                pa.set_memory_pool(pa.system_memory_pool())
            LeanArrow._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with LeanArrow._lock:
            LeanArrow._num_inside -= 1
            if LeanArrow._num_inside == 0:
                pa.set_memory_pool(LeanArrow._before)
                give_back()


def give_back() -> None:
    """Return freed memory that Arrow's and the C library's allocators keep to the system."""
    pa.default_memory_pool().release_unused()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def default_rows_per_group(layout: str, num_rows: int) -> int:
    """8192, twice that in the session layout and four times in the deduplicated one, whose row groups are no larger.

    The larger groups take 1% and 4 to 12% less space. A small log gets several, since readers shuffle row groups.
    """
    return min(max(num_rows // 4, 8_192), {"time": 8_192, "session": 16_384, "deduplicated": 32_768}[layout])
