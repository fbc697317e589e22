"""Cuts a sorted stream of rows into row groups and parts, the same way for every engine that sorts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import is_remote, join_path
from recmill.data.storage.checks import hash_footer
from recmill.data.storage.options import SORT_KEYS

if TYPE_CHECKING:
    from recmill.data.storage.session_encoder import SessionEncoder  # imports torch, which rows do not need

# The last column of the stream: the position of the row's split in the list of splits. It is not written.
SPLIT_COLUMN = "__split"


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """Rows of one split that become one row group; except in the time layout they are whole sessions."""

    split: int
    rows: pa.Table


def cut_row_groups(
    batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, layout: str, rows_per_group: int
) -> Iterator[SplitRows]:
    """Row groups of at most `rows_per_group` rows from a stream sorted by split and SORT_KEYS[layout].

    Rows with equal keys get an order that depends on their content alone, so that every engine writes the same rows in
    the same order. Where sessions stay whole, a session longer than a row group makes a larger row group.
    """
    full_schema = schema.append(pa.field(SPLIT_COLUMN, pa.int32()))
    pending: list[pa.RecordBatch] = []
    num_pending, enough = 0, rows_per_group
    for batch in batches:
        pending.append(_conform(batch, full_schema))
        num_pending += batch.num_rows
        if num_pending <= enough:
            continue
        groups, rest = _cut(pa.Table.from_batches(pending).combine_chunks(), layout, rows_per_group, is_end=False)
        yield from groups
        pending, num_pending = rest.to_batches(), rest.num_rows
        # Doubling: a session of millions of rows is looked at a few times, not once per batch.
        enough = max(rows_per_group, 2 * num_pending)
    if num_pending:
        yield from _cut(pa.Table.from_batches(pending).combine_chunks(), layout, rows_per_group, is_end=True)[0]


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if SPLIT_COLUMN not in batch.schema.names:
        batch = batch.append_column(SPLIT_COLUMN, pa.array(np.zeros(batch.num_rows, np.int32)))
    return batch.select(schema.names).cast(schema)


def _cut(table: pa.Table, layout: str, rows_per_group: int, *, is_end: bool) -> tuple[list[SplitRows], pa.Table]:
    """The row groups that are complete in `table`, and the rows that wait for the next batches."""
    keys = SORT_KEYS[layout]
    unit = (SPLIT_COLUMN, *keys) if layout == "time" else (SPLIT_COLUMN, "session_id")
    starts = run_starts([_numpy(table, name) for name in unit])  # where a session, or a run of equal keys, begins
    closed = table.num_rows if is_end else int(starts[-1])
    table = pa.concat_tables([break_ties(table.slice(0, closed), keys), table.slice(closed)])
    splits = _numpy(table, SPLIT_COLUMN)
    groups, done = [], 0
    for split_start in run_starts([splits[:closed]]):
        split_end = int(np.searchsorted(splits, splits[split_start], side="right"))
        limit = min(split_end, closed)
        must_empty = is_end or split_end < table.num_rows  # no more rows of this split will come
        while done < limit:
            end = _group_end(starts, done, limit, layout, rows_per_group)
            if end == limit and end - done < rows_per_group and not must_empty:
                break
            rows = table.slice(done, end - done).drop_columns([SPLIT_COLUMN])
            groups.append(SplitRows(split=int(splits[done]), rows=rows))
            done = end
    return groups, table.slice(done)


def _group_end(starts: np.ndarray, done: int, limit: int, layout: str, rows_per_group: int) -> int:
    if layout == "time" or done + rows_per_group >= limit:
        return min(done + rows_per_group, limit)
    position = int(np.searchsorted(starts, done + rows_per_group, side="right")) - 1
    end = int(starts[position])
    if end <= done:  # one session is longer than a row group: keep it whole
        end = int(starts[position + 1]) if position + 1 < len(starts) else limit
    return min(end, limit)


def run_starts(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Positions at which any of the sorted columns changes, including the first row."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def break_ties(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The table with rows of equal keys ordered by their content alone: by scalars, then by lists."""
    if table.num_rows < 2:
        return table
    table = table.combine_chunks()
    starts = run_starts([_numpy(table, name) for name in (SPLIT_COLUMN, *keys)])
    lengths = np.diff(np.append(starts, table.num_rows))
    if (lengths == 1).all():
        return table
    run = np.repeat(np.arange(len(starts)), lengths)
    rows = np.flatnonzero((lengths > 1)[run])
    rest = [name for name in table.column_names if name not in keys and name != SPLIT_COLUMN]
    scalars = [_numpy(table, name)[rows] for name in rest if not pa.types.is_list(table.schema.field(name).type)]
    order = np.lexsort([*(_bits(values) for values in reversed(scalars)), run[rows]])
    lists = [_list_buffers(table, name) for name in rest if pa.types.is_list(table.schema.field(name).type)]
    if lists:
        _sort_by_lists(order, [run[rows], *map(_bits, scalars)], rows, lists)
    if (order == np.arange(len(order))).all():
        return table
    indices = np.arange(table.num_rows)
    indices[rows] = rows[order]
    return table.take(pa.array(indices)).combine_chunks()


def _sort_by_lists(order: np.ndarray, scalars: list[np.ndarray], rows: np.ndarray, lists: list[Any]) -> None:
    """Sort, in place, the runs of `order` with equal scalars. Few rows get here, so a Python loop is fast enough."""
    starts = run_starts([values[order] for values in scalars])
    ends = np.append(starts[1:], len(order))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start > 1:
            positions = order[start:end].tolist()
            contents = [tuple(v[o[rows[p]] : o[rows[p] + 1]].tobytes() for o, v in lists) for p in positions]
            ranked = sorted(range(len(positions)), key=contents.__getitem__)
            order[start:end] = [positions[rank] for rank in ranked]


def _bits(values: np.ndarray) -> np.ndarray:
    """Floats as integers with the same bits: a total order in which 0.0 and -0.0 differ."""
    return values.view(np.int32) if values.dtype == np.float32 else values


def _numpy(table: pa.Table, name: str) -> np.ndarray:
    column: np.ndarray = table.column(name).to_numpy()
    return column


def _list_buffers(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    lists = table.column(name).combine_chunks()
    return lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)


@dataclass(frozen=True, kw_only=True)
class PartFormat:
    """The schema and the Parquet settings of the files of a layout."""

    schema: pa.Schema
    options: Mapping[str, Any]
    # Turns the rows of one part into records; None stores the rows themselves.
    make_encoder: Callable[[], SessionEncoder] | None = None


@dataclass(kw_only=True)
class PartWriter:
    """Writes row groups into numbered parts of about `rows_per_part` rows, each of one split."""

    folder: str
    prefix: str
    form: PartFormat
    split_names: Sequence[str]
    rows_per_part: int
    parts: list[dict[str, Any]] = field(default_factory=list)
    _writer: Any = None
    _encoder: SessionEncoder | None = None
    _sink: Any = None
    _sessions: list[np.ndarray] = field(default_factory=list)

    def write(self, group: SplitRows) -> None:
        split = self.split_names[group.split]
        if self._writer is not None:
            is_full = self._encoder is not None and self._encoder.is_full
            is_full |= self.parts[-1]["num_rows"] + group.rows.num_rows > self.rows_per_part
            if is_full or self.parts[-1]["split"] != split:
                self._close_part()
        if self._writer is None:
            self._open_part(split)
        stored = self._encoder.encode(group.rows) if self._encoder else group.rows
        self._writer.write_table(stored, row_group_size=stored.num_rows)
        part = self.parts[-1]
        part["num_rows"] += group.rows.num_rows
        part["row_group_rows"].append(group.rows.num_rows)
        self._sessions.append(_distinct(group.rows.column("session_id").to_numpy()))

    def close(self) -> list[dict[str, Any]]:
        """Finish the last part; the parts as the manifest lists them."""
        if self._writer is not None:
            self._close_part()
        return self.parts

    def _open_part(self, split: str) -> None:
        name = f"{self.prefix}-{len(self.parts):05d}.parquet"
        path = join_path(self.folder, name)
        self._sink = fsspec.open(path, "wb").open() if is_remote(path) else open(path, "wb")  # noqa: SIM115
        self._encoder = self.form.make_encoder() if self.form.make_encoder else None
        self._writer = pq.ParquetWriter(self._sink, self.form.schema, write_page_checksum=True, **self.form.options)
        empty: dict[str, Any] = {"num_rows": 0, "num_sessions": 0, "bytes": 0, "row_group_rows": []}
        self.parts.append({"file": name, "split": split, **empty})

    def _close_part(self) -> None:
        if self._encoder and (metadata := self._encoder.metadata()):
            self._writer.add_key_value_metadata(metadata)
        self._writer.close()
        self.parts[-1]["bytes"] = self._sink.tell()
        self._sink.close()
        self.parts[-1]["footer_sha256"] = hash_footer(join_path(self.folder, self.parts[-1]["file"]))
        self.parts[-1]["num_sessions"] = len(_distinct(np.concatenate(self._sessions)))
        self._writer = self._sink = None
        self._sessions = []


def _distinct(sessions: np.ndarray) -> np.ndarray:
    """Each session once. All layouts but "time" have them sorted, so comparing neighbours replaces np.unique."""
    if (sessions[1:] >= sessions[:-1]).all():
        sorted_once: np.ndarray = sessions[run_starts([sessions])]
        return sorted_once
    return np.unique(sessions)
