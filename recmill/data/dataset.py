"""Reads datasets back to rows, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from recmill.artifacts import Dataset, InputError, join_path
from recmill.data.log import read_file
from recmill.data.schema import Schema

if TYPE_CHECKING:
    from recmill.data.encoding import Encoding


def read_rows(
    dataset: Dataset | str | Path,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    row_groups: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the rows of a dataset in their stored order: of one split or all, all columns or some.

    `row_groups` narrows it to the given row groups of the parts it names (file -> numbers).
    """
    dataset = open_dataset(dataset)
    wanted = row_schema(dataset, columns)
    read_part = READERS.get(dataset.layout)
    if read_part is None:
        raise InputError(f"{dataset.path}: layout {dataset.layout!r} cannot be read by this version of recmill")
    for part in select_parts(dataset, split):
        if row_groups is None:
            yield from read_part(dataset, part, wanted, None)
        elif part["file"] in row_groups:
            yield from read_part(dataset, part, wanted, row_groups[part["file"]])


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


def select_parts(dataset: Dataset, split: str | None) -> list[dict[str, Any]]:
    """The parts of a split, or all of them."""
    if split is None:
        return dataset.parts
    if split not in dataset.splits:
        raise InputError(f"{dataset.path}: no split {split!r}; the dataset has {', '.join(dataset.splits)}")
    return dataset.split_parts(split)


def _read_plain_part(
    dataset: Dataset, part: Mapping[str, Any], wanted: pa.Schema, row_groups: Sequence[int] | None
) -> Iterator[pa.RecordBatch]:
    """A part whose file holds the rows as they are (layouts time and session)."""
    path = join_path(dataset.path, part["file"])
    for batch in read_file(path, columns=wanted.names, row_groups=row_groups):
        yield batch.select(wanted.names).cast(wanted)


def _read_deduplicated_part(
    dataset: Dataset, part: Mapping[str, Any], wanted: pa.Schema, row_groups: Sequence[int] | None
) -> Iterator[pa.RecordBatch]:
    """A part whose file holds one record a session."""
    from recmill.data.deduplicated import decode_rows  # with torch, which other layouts do without
    from recmill.data.encoding import columns_of

    schema, encoding = Schema.load(dataset.path), load_encoding(dataset)
    columns = list(dict.fromkeys(c for name in ("label", *wanted.names) for c in columns_of(name, schema, encoding)))
    path = join_path(dataset.path, part["file"])
    for number in range(len(part["row_group_rows"])) if row_groups is None else row_groups:
        records = list(read_file(path, columns=columns, row_groups=[number]))
        yield decode_rows(pa.Table.from_batches(records), schema, encoding, columns=wanted.names)


def load_encoding(dataset: Dataset) -> Encoding:
    """How a deduplicated dataset stores its features."""
    from recmill.data.encoding import Encoding

    where = join_path(dataset.path, dataset.manifest_name)
    return Encoding.from_json(dataset.body.get("encoding"), Schema.load(dataset.path), where=where)


PartReader = Callable[[Dataset, Mapping[str, Any], pa.Schema, Sequence[int] | None], Iterator[pa.RecordBatch]]
READERS: dict[str, PartReader] = {
    "time": _read_plain_part,
    "session": _read_plain_part,
    "deduplicated": _read_deduplicated_part,
}
