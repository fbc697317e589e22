"""The query over the rows of a log, written once in Ibis for DuckDB and Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa

from recmill.data.log import RawLog
from recmill.data.memory_plan import MemoryPlan
from recmill.data.schema import Schema
from recmill.data.storage.writer import SPLIT_COLUMN, PartFormat, PartWriter, cut_row_groups
from recmill.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What an engine needs to know to write the parts."""

    log: RawLog
    folder: Path  # where the parts are written
    out: str  # where `folder` is moved to in the end; a URL if the dataset is remote
    layout: str
    rows_per_part: int
    memory_limit_bytes: int
    memory: MemoryPlan
    progress: Progress

    @property
    def arrow_schema(self) -> pa.Schema:
        return self.log.schema.arrow_schema()

    @property
    def spill_folder(self) -> Path:
        """Inside the output's temporary folder, on the disk that must hold the output anyway."""
        return self.folder / ".spill"


def canonical_rows(table: Any, schema: Schema, types: Mapping[str, pa.DataType]) -> Any:
    """The columns of the schema, in its order, cast from the types of the file to those of `Schema.arrow_schema`."""
    columns = []
    for field in schema.arrow_schema():
        column = table[field.name]
        if pa.types.is_list(field.type):
            is_plain = pa.types.is_integer(types[field.name])
            column = ibis.array([column.cast("int64")]) if is_plain else column.cast("array<int64>")
        else:
            column = column.cast("float32" if pa.types.is_floating(field.type) else "int64")
        columns.append(column.name(field.name))
    return table.select(columns)


def log_rows(log: RawLog, open_files: Callable[[Sequence[str]], Any]) -> Any:
    """The canonical rows of the log; `open_files` returns the Ibis table of files that have the same types."""
    by_types: dict[tuple[Any, ...], list[str]] = {}
    for file in log.files:
        by_types.setdefault(file.types, []).append(file.path)
    tables = [
        canonical_rows(open_files(paths), log.schema, dict(zip(log.schema.columns, types, strict=True)))
        for types, paths in by_types.items()
    ]
    return ibis.union(*tables) if len(tables) > 1 else tables[0]


def write_sorted(
    batches: Iterable[pa.RecordBatch],
    plan: ClusterPlan,
    form: PartFormat,
    split_names: Sequence[str],
    *,
    folder: str,
    prefix: str,
) -> list[dict[str, Any]]:
    """Write sorted rows to parts in `folder`; the parts as the manifest lists them."""
    writer = PartWriter(
        folder=folder, prefix=prefix, form=form, split_names=split_names, rows_per_part=plan.rows_per_part
    )
    rows_per_group, done = plan.memory.rows_per_group, 0
    groups = cut_row_groups(batches, schema=plan.arrow_schema, layout=plan.layout, rows_per_group=rows_per_group)
    for group in groups:
        writer.write(group)
        done += group.rows.num_rows
        plan.progress("write the dataset", done, plan.log.num_rows)
    return writer.close()


def session_starts(rows: Any) -> Any:
    """One row per session: when it starts."""
    return rows.group_by("session_id").aggregate(start=rows.timestamp.min())


# The first session of a held-out split: its start, and its id if sessions that start together are divided.
Boundary = tuple[int, int | None]


def with_split(rows: Any, boundaries: Sequence[Boundary]) -> Any:
    """The rows with SPLIT_COLUMN: the position of their session's split in the list of splits."""
    starts = session_starts(rows)
    branches = []
    for number, (time, session) in reversed(list(enumerate(boundaries, start=1))):
        is_later = starts.start >= time
        if session is not None:
            is_later = (starts.start > time) | ((starts.start == time) & (starts.session_id >= session))
        branches.append((is_later, number))
    split = ibis.cases(*branches, else_=0).cast("int32")
    return rows.join(starts.select("session_id", **{SPLIT_COLUMN: split}), "session_id")


def with_random_split(rows: Any, *, share: float) -> Any:
    """The rows with SPLIT_COLUMN: 1 for about this share of the sessions (the same on every engine), else 0."""
    is_held_out = _mixed(rows.session_id) < share * MIXING_PRIME
    return rows.mutate(**{SPLIT_COLUMN: ibis.cases((is_held_out, 1), else_=0).cast("int32")})


def sampled(rows: Any, key: Any, *, share: float) -> Any:
    """The rows with about this share of the values of `key`, the same on every engine."""
    return rows.filter(_mixed(key) < share * MIXING_PRIME)


# A prime, so that ids with regular gaps are drawn evenly; small, so that no product overflows.
MIXING_PRIME = 1_000_003


def _mixed(key: Any) -> Any:
    return ((key % MIXING_PRIME).abs() * 7_919) % MIXING_PRIME
