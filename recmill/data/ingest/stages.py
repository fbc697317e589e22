"""The work of each ingestion stage on one row group: read its bytes, decode them to Arrow, transform them to arrays.

Every function here runs in a worker thread and uses no other threads: Arrow, zlib and NumPy release the GIL, and the
pipeline alone decides how many cores are busy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset, InputError, is_remote, join_path
from recmill.data.batch import RowBlock, decode_block
from recmill.data.ingest.splits import RowGroup
from recmill.data.schema import Schema

STAGES = ("read", "decode", "transform", "batch")


@dataclass(frozen=True, kw_only=True)
class RawGroup:
    """The bytes of a row group's columns as they lie in the file from `start` on."""

    start: int
    data: bytes


class PartFile:
    """A Parquet part that several threads read at once: positioned reads, no shared cursor."""

    def __init__(self, path: str, *, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        self._filesystem: Any = None
        self._descriptor = -1
        try:
            if is_remote(path):
                self._filesystem, self._name = fsspec.core.url_to_fs(path)
                with self._filesystem.open(self._name, "rb") as file:
                    self.metadata = pq.read_metadata(file)
            else:
                self._descriptor = os.open(path, os.O_RDONLY)
                self.metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowException) as error:
            self.close()
            raise InputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from error
        self._leaves = self._find_leaves()

    def _find_leaves(self) -> list[int]:
        schema = self.metadata.schema
        leaves = {schema.column(leaf).path.split(".")[0]: leaf for leaf in range(len(schema))}
        for name in self.columns:
            if name not in leaves:
                raise InputError(f"{self.path}: column {name!r} is missing; it has {', '.join(leaves)}")
        return [leaves[name] for name in self.columns]

    def byte_range(self, group: int) -> tuple[int, int]:
        """Where the wanted columns of a row group lie in the file."""
        chunks = [self.metadata.row_group(group).column(leaf) for leaf in self._leaves]
        starts = [
            min(chunk.data_page_offset, chunk.dictionary_page_offset)
            if chunk.dictionary_page_offset
            else chunk.data_page_offset
            for chunk in chunks
        ]
        stops = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        return min(starts), max(stops)

    def decoded_bytes(self, group: int) -> int:
        """An upper bound of the bytes of the decoded columns: the footer knows how many values each holds."""
        row_group = self.metadata.row_group(group)
        num_values = sum(row_group.column(leaf).num_values for leaf in self._leaves)
        return 8 * num_values + 8 * len(self._leaves) * (row_group.num_rows + 1)

    def read(self, group: int) -> RawGroup:
        start, stop = self.byte_range(group)
        if self._filesystem is not None:
            data = self._filesystem.cat_file(self._name, start=start, end=stop)
        else:
            data = os.pread(self._descriptor, stop - start, start)
        if len(data) != stop - start:
            raise InputError(f"{self.path}, row group {group}: the file is truncated")
        return RawGroup(start=start, data=data)

    def decode(self, group: int, raw: RawGroup) -> pa.Table:
        source = pa.PythonFile(_Window(raw), mode="r")
        with pq.ParquetFile(source, metadata=self.metadata, pre_buffer=False) as file:
            return file.read_row_group(group, columns=self.columns, use_threads=False)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Window:
    """The file that Arrow sees: it has the bytes of one row group, at their place, and no others."""

    def __init__(self, raw: RawGroup) -> None:
        self._raw = raw
        self._buffer = pa.py_buffer(raw.data)
        self._position = 0
        self.closed = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = self._raw.start + len(self._raw.data)
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read_buffer(self, num_bytes: int) -> pa.Buffer:
        """Bytes from the cursor on, without a copy (Arrow prefers this over `read`)."""
        start = self._position - self._raw.start
        assert start >= 0, "Arrow asked for bytes outside of the row group"
        piece = self._buffer.slice(start, min(num_bytes, len(self._raw.data) - start))
        self._position += piece.size
        return piece

    def read(self, num_bytes: int) -> bytes:
        return bytes(self.read_buffer(num_bytes))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class PlainReader:
    """Reads the layouts that store one record a sample (`time`, `session`)."""

    def __init__(self, dataset: Dataset, schema: Schema) -> None:
        self._dataset = dataset
        self._schema = schema
        self._columns = ["label", *(feature.name for feature in schema.features)]
        self._parts: dict[str, PartFile] = {}
        self._lock = threading.Lock()

    def part(self, group: RowGroup) -> PartFile:
        with self._lock:
            if group.file not in self._parts:
                path = join_path(self._dataset.path, group.file)
                self._parts[group.file] = PartFile(path, columns=self._columns)
            return self._parts[group.file]

    def raw_bytes(self, group: RowGroup) -> int:
        start, stop = self.part(group).byte_range(group.index)
        return stop - start

    def expanded_bytes(self, group: RowGroup) -> int:
        """The most that the row group takes on its way: its bytes in the file and its decoded columns."""
        return self.raw_bytes(group) + self.part(group).decoded_bytes(group.index)

    def read(self, group: RowGroup) -> RawGroup:
        return self.part(group).read(group.index)

    def decode(self, group: RowGroup, raw: RawGroup) -> pa.Table:
        try:
            return self.part(group).decode(group.index, raw)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.describe(group)}: cannot be decoded ({_first_line(error)})") from error

    def transform(self, group: RowGroup, table: pa.Table) -> RowBlock:
        return decode_block(table, self._schema, where=self.describe(group))

    def describe(self, group: RowGroup) -> str:
        return join_path(self._dataset.path, str(group))

    def close(self) -> None:
        with self._lock:
            for part in self._parts.values():
                part.close()
            self._parts.clear()


READERS: dict[str, Callable[[Dataset, Schema], PlainReader]] = {"time": PlainReader, "session": PlainReader}


def open_reader(dataset: Dataset, schema: Schema) -> PlainReader:
    """The reader of the dataset's layout."""
    if dataset.layout not in READERS:
        raise InputError(
            f"{dataset.path}: layout {dataset.layout!r} cannot be read yet, expected {' or '.join(READERS)}"
        )
    return READERS[dataset.layout](dataset, schema)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
