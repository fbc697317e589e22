"""Cuts a sorted stream of rows into row groups and parts, the same way whichever engine did the sorting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import is_remote, join_path

# The column, last in the stream and not written, that says which split a row belongs to (its position in the names).
SPLIT_COLUMN = "__split"

SORT_KEYS = {
    "time": ("timestamp", "session_id"),
    "session": ("session_id", "timestamp"),
    "deduplicated": ("session_id", "timestamp"),
}


DICTIONARY = "DICTIONARY"

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows that are written together; but in the time layout they are whole sessions."""

    split: int
    rows: pa.Table


def cut_row_groups(
    batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, layout: str, rows_per_group: int
) -> Iterator[RowGroup]:
    """Row groups of at most `rows_per_group` rows from a stream sorted by split and SORT_KEYS[layout].

    Rows whose keys are equal are put in an order that depends on their content alone, so that every engine gives the
    same rows in the same order. Where sessions stay whole, one longer than a row group makes a bigger one.
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
        # Doubling: a session of millions of rows is looked at a few times, not once for every batch of it.
        enough = max(rows_per_group, 2 * num_pending)
    if num_pending:
        yield from _cut(pa.Table.from_batches(pending).combine_chunks(), layout, rows_per_group, is_end=True)[0]


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if SPLIT_COLUMN not in batch.schema.names:
        batch = batch.append_column(SPLIT_COLUMN, pa.array(np.zeros(batch.num_rows, np.int32)))
    return batch.select(schema.names).cast(schema)


def _cut(table: pa.Table, layout: str, rows_per_group: int, *, is_end: bool) -> tuple[list[RowGroup], pa.Table]:
    """The row groups that are complete in `table`, and the rows that must wait for what comes next."""
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
        must_empty = is_end or split_end < table.num_rows  # nothing more of this split will come
        while done < limit:
            end = _group_end(starts, done, limit, layout, rows_per_group)
            if end == limit and end - done < rows_per_group and not must_empty:
                break
            rows = table.slice(done, end - done).drop_columns([SPLIT_COLUMN])
            groups.append(RowGroup(split=int(splits[done]), rows=rows))
            done = end
    return groups, table.slice(done)


def _group_end(starts: np.ndarray, done: int, limit: int, layout: str, rows_per_group: int) -> int:
    if layout == "time" or done + rows_per_group >= limit:
        return min(done + rows_per_group, limit)
    position = int(np.searchsorted(starts, done + rows_per_group, side="right")) - 1
    end = int(starts[position])
    if end <= done:  # one session fills more than a row group: take it whole
        end = int(starts[position + 1]) if position + 1 < len(starts) else limit
    return min(end, limit)


def run_starts(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Positions where any of the sorted columns changes, the first row included."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def break_ties(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The table with rows of equal keys in an order that only their content decides: scalars first, then lists."""
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
    """Sort, in place, the stretches of `order` that the scalars leave equal. Few rows get here, so Python will do."""
    starts = run_starts([values[order] for values in scalars])
    ends = np.append(starts[1:], len(order))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start > 1:
            positions = order[start:end].tolist()
            contents = [tuple(v[o[rows[p]] : o[rows[p] + 1]].tobytes() for o, v in lists) for p in positions]
            ranked = sorted(range(len(positions)), key=contents.__getitem__)
            order[start:end] = [positions[rank] for rank in ranked]


def _bits(values: np.ndarray) -> np.ndarray:
    """Floats as the integers of their bits: a total order in which 0.0 and -0.0 differ."""
    return values.view(np.int32) if values.dtype == np.float32 else values


def _numpy(table: pa.Table, name: str) -> np.ndarray:
    column: np.ndarray = table.column(name).to_numpy()
    return column


def _list_buffers(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    lists = table.column(name).combine_chunks()
    return lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)


LONG_LIST = 4  # ids a list, on average
LEVEL = 15  # of zstd. From here on it codes the planes of split bytes apart: item values of `recd` 5% below level 6
LONG_LIST_LEVEL = 17
TRIAL_LEVEL = 6  # ranks the encodings of long lists as 17 does, in a fraction of the time
PAGE_BYTES = 8 * 2**20


def writer_options(schema: pa.Schema, layout: str) -> dict[str, Any]:
    """Settings of our Parquet files of rows, chosen by size and reading speed.

    65,536 rows of three lists of 20 ids, a history of 64, an item id and two dense values, 16 samples a session, row
    groups of 8192, zstd 3: dictionaries (the default) 8.1 MB, delta 10.2 MB, plain 3.3 MB, byte-stream-split ids
    2.7 MB, delta keys and a dictionary for the label besides 2.6 MB; reading takes as long as plain. With one sample a
    session 16.8 against 7.9 MB. Vocabularies of 11 values come out even. Dense values stay plain: splitting the
    bytes of those that repeat doubles their size.
    """
    lists = [leaf_path(field) for field in schema if pa.types.is_list(field.type)]
    encodings = dict.fromkeys(lists, "BYTE_STREAM_SPLIT") | dict.fromkeys(SORT_KEYS[layout], "DELTA_BINARY_PACKED")
    return {
        "compression": "zstd",
        "compression_level": 3,
        "write_statistics": True,
        "use_dictionary": ["label"],
        "column_encoding": encodings,
        "sorting_columns": [pq.SortingColumn(schema.get_field_index(name)) for name in SORT_KEYS[layout]],
    }


def measured_options(sample: pa.Table, layout: str) -> dict[str, Any]:
    """Settings for rows like these: for each column the encoding that makes it smallest.

    Lists of several ids get zstd 17: on `recd`, rows of a session that repeat them take 2.5% less than with 6, for a
    fifth of the writing speed. Pages of 8 MB, so that one holds the rows of a row group.
    """
    is_long = {column.name: has_long_lists(sample.column(column.name)) for column in sample.schema}
    best = for_columns(
        sample.schema,
        lambda column: smallest_encoding(sample, column, level=TRIAL_LEVEL if is_long[column.name] else LEVEL),
    )
    return writer_options(sample.schema, layout) | {
        "compression_level": {
            leaf_path(column): LONG_LIST_LEVEL if is_long[column.name] else LEVEL for column in sample.schema
        },
        "data_page_size": PAGE_BYTES,
        "use_dictionary": [path for path, encoding in best.items() if encoding == DICTIONARY],
        "column_encoding": {path: encoding for path, encoding in best.items() if encoding != DICTIONARY},
    }


def has_long_lists(column: pa.ChunkedArray) -> bool:
    return pa.types.is_list(column.type) and len(column.combine_chunks().flatten()) >= LONG_LIST * len(column)


def for_columns(schema: pa.Schema, choose: Callable[[pa.Field], Found]) -> dict[str, Found]:
    """What `choose` finds for each column, by path; on all cores, since compressing does not hold the GIL."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return dict(zip([leaf_path(column) for column in schema], pool.map(choose, schema), strict=True))


def smallest_encoding(sample: pa.Table, field: pa.Field, *, level: int) -> str:
    """The encoding that makes a column of `sample` smallest."""
    values = field.type.value_type if pa.types.is_list(field.type) else field.type
    column, sizes = sample.select([field.name]), {}
    for encoding in [DICTIONARY, "PLAIN", "BYTE_STREAM_SPLIT"] + ["DELTA_BINARY_PACKED"] * pa.types.is_integer(values):
        sizes[encoding] = encoded_bytes(column, encoding, level)
    return min(sizes, key=lambda encoding: sizes[encoding])


def encoded_bytes(column: pa.Table, encoding: str, level: int) -> int:
    """Size of a Parquet file with one column."""
    options: dict[str, Any] = {}
    if encoding != DICTIONARY:
        options = {"column_encoding": {leaf_path(column.schema.field(0)): encoding}, "use_dictionary": False}
    sink = pa.BufferOutputStream()
    pq.write_table(column, sink, compression="zstd", compression_level=level, **options)
    return int(sink.tell())


def leaf_path(field: pa.Field) -> str:
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


class PartEncoder(Protocol):
    """Turns the rows of one part into what is stored of them."""

    def encode(self, rows: pa.Table) -> pa.Table: ...

    def metadata(self) -> Mapping[bytes, bytes]:
        """For the footer, once all rows are encoded."""

    @property
    def is_full(self) -> bool:
        """Whether further rows should go to another part."""


class PlainEncoder:
    """Stores the rows themselves."""

    is_full = False

    def encode(self, rows: pa.Table) -> pa.Table:
        return rows

    def metadata(self) -> Mapping[bytes, bytes]:
        return {}


@dataclass(frozen=True, kw_only=True)
class PartFormat:
    """What the files of a layout look like."""

    schema: pa.Schema
    options: Mapping[str, Any]
    make_encoder: Callable[[], PartEncoder] = PlainEncoder  # called for each part

    @classmethod
    def of_rows(cls, schema: pa.Schema, layout: str, sample: pa.Table | None = None) -> Self:
        """The rows themselves, with the settings that suit a sample of them."""
        has_rows = sample is not None and sample.num_rows > 0
        options = measured_options(sample, layout) if has_rows else writer_options(schema, layout)
        return cls(schema=schema, options=options)


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
    _encoder: PartEncoder = field(default_factory=PlainEncoder)
    _sink: Any = None
    _sessions: list[np.ndarray] = field(default_factory=list)

    def write(self, group: RowGroup) -> None:
        split = self.split_names[group.split]
        if self._writer is not None:
            is_full = self.parts[-1]["num_rows"] + group.rows.num_rows > self.rows_per_part or self._encoder.is_full
            if is_full or self.parts[-1]["split"] != split:
                self._close_part()
        if self._writer is None:
            self._open_part(split)
        stored = self._encoder.encode(group.rows)
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
        self._encoder = self.form.make_encoder()
        self._writer = pq.ParquetWriter(self._sink, self.form.schema, **self.form.options)
        empty: dict[str, Any] = {"num_rows": 0, "num_sessions": 0, "bytes": 0, "row_group_rows": []}
        self.parts.append({"file": name, "split": split, **empty})

    def _close_part(self) -> None:
        if metadata := self._encoder.metadata():
            self._writer.add_key_value_metadata(metadata)
        self._writer.close()
        self.parts[-1]["bytes"] = self._sink.tell()
        self._sink.close()
        self.parts[-1]["num_sessions"] = len(_distinct(np.concatenate(self._sessions)))
        self._writer = self._sink = None
        self._sessions = []


def _distinct(sessions: np.ndarray) -> np.ndarray:
    """Each session once. All layouts but "time" have them sorted, so comparing finds what np.unique hashes for."""
    if (sessions[1:] >= sessions[:-1]).all():
        sorted_once: np.ndarray = sessions[run_starts([sessions])]
        return sorted_once
    return np.unique(sessions)
