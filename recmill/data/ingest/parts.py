"""Parquet part files for worker threads: one step reads the bytes of a row group, another decodes them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa

from kernels.check_pages import first_page
from kernels.decode_pages import DecodedRows, GroupDecoder
from kernels.recycled import recycled_array
from recmill.artifacts import InputError, is_remote
from recmill.data.ingest.memory import Charge
from recmill.data.ingest.splits import StoredGroup
from recmill.data.storage.checks import first_line, read_footer


@dataclass(frozen=True, kw_only=True)
class RawGroup:
    """The bytes of a row group's columns, which begin at `start` in the file."""

    start: int
    data: bytes | pa.Buffer

    @property
    def nbytes(self) -> int:
        return len(self.data)


class PartFile:
    """A part that several threads read at once: positioned reads, no shared cursor."""

    def __init__(
        self,
        path: str,
        *,
        columns: Sequence[str],
        label: str = "label",
        decodes_pages: bool = True,
        bounds: Mapping[str, int] | None = None,
        footer_sha256: str | None = None,
    ) -> None:
        """Arrow decodes the columns that our kernel does not support, or all of them unless `decodes_pages`.

        `label` names one of the columns that has one value per sample in every layout.

        `bounds`: the rows of each list column's table, from callers that also take DecodedRows instead of tables.

        `footer_sha256` comes with files whose pages all have checksums: both are checked. Without it, pages that have
        checksums are.
        """
        self.path, self._label = path, label
        self.columns = list(columns)
        self._filesystem: Any = None
        self._file: io.FileIO | None = None
        try:
            if is_remote(path):
                self._filesystem, self._name = fsspec.core.url_to_fs(path)
            else:
                self._file = io.FileIO(path)
            self.metadata = read_footer(path, footer_sha256)
        except OSError as error:
            raise InputError(f"{path}: cannot be read as Parquet ({first_line(error)})") from error
        self._leaves = self._find_leaves()
        self._decoder = GroupDecoder(
            self.metadata,
            self._leaves,
            bounds=bounds,
            needs_checksums=footer_sha256 is not None,
            kernel=None if decodes_pages else "reference",
        )
        self._ranges: dict[int, tuple[int, int]] = {}

    def _find_leaves(self) -> list[int]:
        schema = self.metadata.schema
        leaves = {schema.column(leaf).path.split(".")[0]: leaf for leaf in range(len(schema))}
        for name in self.columns:
            if name not in leaves:
                raise InputError(f"{self.path}: column {name!r} is missing; it has {', '.join(leaves)}")
        return [leaves[name] for name in self.columns]

    def check(self, group: StoredGroup) -> None:
        """Raise if the file does not match dataset.json."""
        found = self._count_rows(group.index) if group.index < self.metadata.num_row_groups else 0
        if found != group.num_rows:
            raise InputError(
                f"{self.path}, row group {group.index}: has {found} rows, dataset.json says {group.num_rows}"
            )

    def _count_rows(self, index: int) -> int:
        """Samples of a row group, counted by labels: a record may be a sample or a whole row group."""
        return int(self.metadata.row_group(index).column(self._leaves[self.columns.index(self._label)]).num_values)

    def byte_range(self, index: int) -> tuple[int, int]:
        """Where the columns of a row group begin and end in the file."""
        if index not in self._ranges:  # a row group is read every epoch
            row_group = self.metadata.row_group(index)
            chunks = [row_group.column(leaf) for leaf in self._leaves]
            starts = [first_page(chunk) for chunk in chunks]
            stops = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
            self._ranges[index] = min(starts), max(stops)
        return self._ranges[index]

    def charge(self, index: int, *, num_distinct_lists: int = 0) -> Charge:
        """Upper bounds of the bytes that a row group takes while it is decoded and afterwards.

        The footer gives the number of values of each column: 8 bytes per value, and 8 per row and column (offsets and
        lengths of lists; the second copy of dense values). The uncompressed size would be too low: a dictionary of
        1,000 ids stores an id in 10 bits. While decoding, Arrow holds levels and pages, 8 bytes per value, and doubles
        the buffer of one column at a time, 24 bytes per value of the longest column. Measured: 6 to 13 bytes per value
        for columns of 1 to 200 ids per row, 27 for a single column of 600.

        `num_distinct_lists` is the number of list columns that are searched for repeats: if there are no repeats,
        starts, lengths and inverses take 8 bytes per row more than Arrow's offsets, and the search 24 temporarily.
        """
        row_group, num_rows = self.metadata.row_group(index), self._count_rows(index)
        start, stop = self.byte_range(index)
        num_values = [int(row_group.column(leaf).num_values) for leaf in self._leaves]
        settled = 8 * sum(num_values) + 8 * (len(num_values) + 1) * (num_rows + 1)
        decoding = (stop - start) + 8 * sum(num_values) + 24 * max(num_values)
        if num_distinct_lists:
            settled += (8 * num_distinct_lists + 16) * (num_rows + 1)
            decoding += 24 * num_distinct_lists * (num_rows + 1)
        return Charge(admitted_bytes=settled + decoding, settled_bytes=settled, value_bytes=8 * sum(num_values))

    def read(self, index: int) -> RawGroup:
        start, stop = self.byte_range(index)
        if self._file is not None:
            # In memory of earlier row groups; a new bytes object would fault in new pages.
            data: bytes | pa.Buffer = pa.py_buffer(recycled_array(stop - start, np.uint8))
            num_read = os.preadv(self._file.fileno(), [memoryview(data)], start)
        else:
            data = self._filesystem.cat_file(self._name, start=start, end=stop)
            num_read = len(data)
        if num_read != stop - start:
            raise InputError(f"{self.path}, row group {index}: the file is truncated")
        return RawGroup(start=start, data=data)

    def decode(self, index: int, raw: RawGroup) -> pa.Table | DecodedRows:
        return self._decoder.decode(raw.data, raw.start, index)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
