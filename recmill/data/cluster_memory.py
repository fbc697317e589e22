"""How much of the memory limit of clustering goes to the sort, and how much to what is done with the sorted rows.

Two things happen outside of DuckDB: a sample of rows is looked at, and row groups are cut, encoded and written. Their
sizes are planned so that with DuckDB's own limit they stay below the limit that is given. What it does not cover: the
program itself (420 MB with torch, which the deduplicated layout needs), what DuckDB takes beyond its limit, and memory
that allocators keep. Measured: 100,000 rows of 3 kB, time layout, a limit of 300 MB: the process grew by 400 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from recmill.data.log import RawLog

SAMPLE_ROWS = 32_768  # of these it is seen how much the features repeat
MAX_BATCH_ROWS = 32_768
MIN_ROWS_PER_GROUP = 1_024
# Copies of its rows that live while a row group is cut and written (measured on `recd`: 2.7), and those of the sample.
COPIES = {"time": 3, "session": 3, "deduplicated": 4}
SAMPLE_COPIES = 5
MAX_SHARE = 0.25  # of the limit, for what DuckDB does not count
MIN_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes that keep clustering inside its limit."""

    rows_per_group: int
    batch_rows: int  # of the stream that comes out of the sort
    sample_rows: int
    sort_bytes: int  # DuckDB's own limit

    @classmethod
    def of(
        cls, log: RawLog, *, layout: str, limit_bytes: int, rows_per_group: int | None, rows_per_part: int
    ) -> MemoryPlan:
        """A `rows_per_group` that is given is kept; else it is the usual one, or what the limit allows."""
        row_bytes, spare = log.row_bytes, int(MAX_SHARE * limit_bytes)
        if rows_per_group is None:
            usual = min(default_rows_per_group(layout, log.num_rows), rows_per_part)
            affordable = spare * 2 // (3 * COPIES[layout] * row_bytes)  # the batches that come take half as much again
            rows_per_group = max(min(usual, affordable), min(usual, MIN_ROWS_PER_GROUP))
        batch_rows = max(2_048, min(MAX_BATCH_ROWS, rows_per_group // 2))
        most = SAMPLE_ROWS if layout == "deduplicated" else SAMPLE_ROWS // 4
        sample_rows = min(most, max(MIN_ROWS_PER_GROUP, spare // (SAMPLE_COPIES * row_bytes)))
        held_rows = min(rows_per_group + batch_rows, log.num_rows)
        needed = max(COPIES[layout] * held_rows * row_bytes, int(MIN_SHARE * limit_bytes))
        return cls(
            rows_per_group=rows_per_group,
            batch_rows=batch_rows,
            sample_rows=sample_rows,
            sort_bytes=max(limit_bytes - needed, int(MIN_SHARE * limit_bytes)),
        )


def default_rows_per_group(layout: str, num_rows: int) -> int:
    """8192; twice that in the session layout and four times in the deduplicated one, whose row groups are no larger.

    They take 1% and 4 to 12% less space. Readers shuffle and share out row groups, so a small log is cut into several.
    """
    return min(max(num_rows // 4, 8_192), {"time": 8_192, "session": 16_384, "deduplicated": 32_768}[layout])
