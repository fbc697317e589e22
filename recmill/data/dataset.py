"""Reads datasets back to rows, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset, InputError, join_path
from recmill.artifacts.dataset import DatasetPart
from recmill.data.log import read_file
from recmill.data.schema import Schema

if TYPE_CHECKING:
    from recmill.data.storage.encoding import Encoding


def read_rows(
    dataset: Dataset | str | Path,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    row_groups: Mapping[str, Sequence[int]] | None = None,
    sessions: tuple[int, int] | None = None,
    times: tuple[int, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the rows of a dataset in their stored order: of one split or all, all columns or some.

    `row_groups` narrows it to the given row groups of the parts it names (file -> numbers). `sessions` and `times` are
    the first and the last session id, or timestamp, that is wanted; row groups that hold none are not read.
    """
    dataset = open_dataset(dataset)
    if sessions or times:
        yield from _read_range(dataset, split, columns, row_groups, {"session_id": sessions, "timestamp": times})
        return
    wanted = row_schema(dataset, columns)
    read_part = READERS.get(dataset.layout)
    if read_part is None:
        raise InputError(f"{dataset.path}: layout {dataset.layout!r} cannot be read by this version of recmill")
    for part in select_parts(dataset, split):
        if row_groups is None:
            yield from read_part(dataset, part, wanted, None)
        elif part.file in row_groups:
            yield from read_part(dataset, part, wanted, row_groups[part.file])


def _read_range(
    dataset: Dataset,
    split: str | None,
    columns: Sequence[str] | None,
    row_groups: Mapping[str, Sequence[int]] | None,
    wanted: Mapping[str, tuple[int, int] | None],
) -> Iterator[pa.RecordBatch]:
    names = row_schema(dataset, columns).names
    limits = {name: limit for name, limit in wanted.items() if limit}
    for part in select_parts(dataset, split):
        ranges = row_group_ranges(dataset, part)
        chosen = range(len(ranges)) if row_groups is None else row_groups.get(part.file, ())
        near = [
            number
            for number in chosen
            if all(
                low <= limits[name][1] and high >= limits[name][0]
                for name, (low, high) in ranges[number].items()
                if name in limits
            )
        ]
        if not near:
            continue
        read = list(dict.fromkeys([*names, *limits]))
        for batch in read_rows(dataset, columns=read, row_groups={part.file: near}):
            inside = np.ones(batch.num_rows, np.bool_)
            for name, (first, last) in limits.items():
                values = batch.column(name).to_numpy()
                inside &= (values >= first) & (values <= last)
            if inside.any():
                yield batch.filter(pa.array(inside)).select(names)


def row_group_ranges(dataset: Dataset, part: DatasetPart) -> list[dict[str, tuple[int, int]]]:
    """Lowest and highest `session_id` and `timestamp` of each row group of a part, by the statistics in its footer."""
    with fsspec.open(join_path(dataset.path, part.file), "rb") as source:
        footer = pq.read_metadata(source)
    ranges = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = {group.column(leaf).path_in_schema: group.column(leaf) for leaf in range(group.num_columns)}
        found = {}
        for name, (lowest, highest) in RANGE_COLUMNS[dataset.layout].items():
            low, high = columns[lowest].statistics, columns[highest].statistics
            if low is not None and high is not None and low.has_min_max and high.has_min_max:
                found[name] = (low.min, high.max)
        ranges.append(found)
    return ranges


def read_table(
    dataset: Dataset | str | Path, *, split: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """All rows of a dataset, or of one split, as one table."""
    dataset = open_dataset(dataset)
    batches = list(read_rows(dataset, split=split, columns=columns))
    return pa.Table.from_batches(batches, schema=row_schema(dataset, columns))


def open_dataset(dataset: Dataset | str | Path) -> Dataset:
    return dataset if isinstance(dataset, Dataset) else Dataset.load(dataset)


def row_schema(dataset: Dataset, columns: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of the rows, narrowed to `columns` in the order given."""
    schema = Schema.load(dataset.path).arrow_schema()
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise InputError(f"{dataset.path}: no column {name!r}; the dataset has {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def select_parts(dataset: Dataset, split: str | None) -> list[DatasetPart]:
    """The parts of a split, or all of them."""
    if split is None:
        return list(dataset.parts)
    if split not in dataset.splits:
        raise InputError(f"{dataset.path}: no split {split!r}; the dataset has {', '.join(dataset.splits)}")
    return dataset.split_parts(split)


def _read_plain_part(
    dataset: Dataset, part: DatasetPart, wanted: pa.Schema, row_groups: Sequence[int] | None
) -> Iterator[pa.RecordBatch]:
    """A part whose file holds the rows as they are (layouts time and session)."""
    path = join_path(dataset.path, part.file)
    for batch in read_file(path, columns=wanted.names, row_groups=row_groups):
        yield batch.select(wanted.names).cast(wanted)


def _read_deduplicated_part(
    dataset: Dataset, part: DatasetPart, wanted: pa.Schema, row_groups: Sequence[int] | None
) -> Iterator[pa.RecordBatch]:
    """A part whose file holds one record a session."""
    from recmill.data.storage.deduplicated import decode_rows  # with torch, which other layouts do without
    from recmill.data.storage.encoding import columns_of

    schema = Schema.load(dataset.path)
    encoding = load_encoding(dataset, schema)
    columns = list(dict.fromkeys(c for name in ("label", *wanted.names) for c in columns_of(name, schema, encoding)))
    path = join_path(dataset.path, part.file)
    for number in range(len(part.row_group_rows)) if row_groups is None else row_groups:
        records = list(read_file(path, columns=columns, row_groups=[number]))
        yield decode_rows(pa.Table.from_batches(records), schema, encoding, columns=wanted.names)


def load_encoding(dataset: Dataset, schema: Schema | None = None) -> Encoding:
    """How a deduplicated dataset stores its features; `schema` is the dataset's own, if the caller has it already."""
    from recmill.data.storage.encoding import Encoding

    where = join_path(dataset.path, dataset.manifest_name)
    return Encoding.from_json(dataset.encoding, schema or Schema.load(dataset.path), where=where)


_PLAIN_RANGES = {name: (name, name) for name in ("session_id", "timestamp")}
# The columns of a file whose statistics have the lowest and the highest value of a row group.
RANGE_COLUMNS = {
    "time": _PLAIN_RANGES,
    "session": _PLAIN_RANGES,
    "deduplicated": {
        "session_id": ("session_id.list.element", "session_id.list.element"),
        "timestamp": ("timestamp/first.list.element", "timestamp/last.list.element"),
    },
}
PartReader = Callable[[Dataset, DatasetPart, pa.Schema, Sequence[int] | None], Iterator[pa.RecordBatch]]
READERS: dict[str, PartReader] = {
    "time": _read_plain_part,
    "session": _read_plain_part,
    "deduplicated": _read_deduplicated_part,
}
