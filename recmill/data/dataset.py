"""Reads datasets back to rows, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from recmill.artifacts import Dataset, InputError, join_path
from recmill.artifacts.dataset import DatasetPart
from recmill.data.log import read_file
from recmill.data.schema import Schema
from recmill.data.storage.checks import check_part
from recmill.data.storage.deduplicated import decode_rows
from recmill.data.storage.encoding import Encoding, columns_of


def read_rows(
    dataset: Dataset | str | Path,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    row_groups: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the rows of a dataset, or of one split, in their stored order, with all columns or some.

    `row_groups` (file -> numbers) restricts it to these row groups of the parts it names.
    """
    dataset = open_dataset(dataset)
    wanted = row_schema(dataset, columns)
    read_part = _read_deduplicated_part if dataset.layout == "deduplicated" else _read_plain_part
    for part in select_parts(dataset, split):
        if row_groups is None:
            yield from read_part(dataset, part, wanted, None)
        elif part.file in row_groups:
            yield from read_part(dataset, part, wanted, row_groups[part.file])


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
    """The Arrow schema of the rows, with `columns` only, in the order given."""
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
    """A part whose file holds the rows themselves (layouts time and session)."""
    path = join_path(dataset.path, part.file)
    check_part(path, part.footer_sha256, columns=wanted.names, row_groups=row_groups)
    for batch in read_file(path, columns=wanted.names, row_groups=row_groups):
        yield batch.select(wanted.names).cast(wanted)


def _read_deduplicated_part(
    dataset: Dataset, part: DatasetPart, wanted: pa.Schema, row_groups: Sequence[int] | None
) -> Iterator[pa.RecordBatch]:
    """A part whose file holds one record per row group."""
    schema = Schema.load(dataset.path)
    encoding = load_encoding(dataset, schema)
    columns = list(
        dict.fromkeys(c for name in (schema.labels[0], *wanted.names) for c in columns_of(name, schema, encoding))
    )
    path = join_path(dataset.path, part.file)
    for number in range(len(part.row_group_rows)) if row_groups is None else row_groups:
        check_part(path, part.footer_sha256, columns=columns, row_groups=[number])
        records = list(read_file(path, columns=columns, row_groups=[number]))
        yield decode_rows(pa.Table.from_batches(records), schema, encoding, columns=wanted.names)


def load_encoding(dataset: Dataset, schema: Schema | None = None) -> Encoding:
    """How a deduplicated dataset stores its features. `schema` is the dataset's own, if the caller has loaded it."""
    where = join_path(dataset.path, dataset.manifest_name)
    return Encoding.from_json(dataset.encoding, schema or Schema.load(dataset.path), where=where)
