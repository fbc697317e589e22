"""Raw interaction logs: Parquet files that are opened and checked before anything is made from them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, hash_json, is_remote, read_json
from recmill.data.schema import Feature, Schema
from recmill.progress import Progress, no_progress

CHECKS_FILE = "checks.json"  # of a log from recmill prepare: what the checks of its data found
VOCABULARY_FOLDER = "vocabulary"  # of a log from recmill prepare: Parquet files that are not rows of the log
VALIDATE_BATCH_ROWS = 65_536
VALIDATE_BATCH_BYTES = 8_000_000
MAX_COLUMNS_AT_ONCE = 4
MAX_INT64 = np.iinfo(np.int64).max
READ_BYTES = 65_536  # per column and read; otherwise Arrow holds the stored bytes of all columns of a row group


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One Parquet file of a log, described by its footer."""

    path: str
    num_rows: int
    num_bytes: int
    num_values: int  # in the schema's columns; a list has several
    footer_hash: str
    types: tuple[pa.DataType, ...]  # of the schema's columns, in their order


@dataclass(frozen=True, kw_only=True)
class RawLog:
    """A log whose files, columns and types fit its schema. `validate` also checks the values."""

    path: str
    schema: Schema
    files: tuple[LogFile, ...]

    @classmethod
    def open(cls, path: str | Path, schema: Schema | str | Path | None = None, *, has_labels: bool = True) -> Self:
        """Open a Parquet file or a folder of them, with `schema.json` beside them unless `schema` is given.

        A log that is only scored needs no labels: `has_labels=False`.
        """
        filesystem, root = fsspec.core.url_to_fs(str(path))
        if not filesystem.exists(root):
            raise InputError(f"{path}: no such file or folder; expected Parquet files with a schema.json beside them")
        is_folder = filesystem.isdir(root)
        if schema is None:
            schema = Schema.load(str(path) if is_folder else str(path).rpartition("/")[0] or ".")
        elif not isinstance(schema, Schema):  # the file may have any name
            schema = (
                Schema.load(schema) if _is_folder(schema) else Schema.from_json(read_json(schema), where=str(schema))
            )
        names = sorted(_parquet_files(filesystem, root)) if is_folder else [root]
        if not names:
            raise InputError(f"{path}: the folder holds no *.parquet file")
        shown = filesystem.unstrip_protocol if is_remote(path) else str
        columns = [name for name in schema.columns if has_labels or name not in schema.labels]
        files = tuple(_open_file(filesystem, shown(name), schema, columns) for name in names)
        if sum(file.num_rows for file in files) == 0:
            raise InputError(f"{path}: the log is empty: 0 rows in {len(files)} file(s)")
        return cls(path=str(path), schema=schema, files=files)

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def row_bytes(self) -> int:
        """Mean bytes of a row in memory: 8 per value, and 8 per list for its end."""
        num_values = sum(file.num_values for file in self.files)
        return 8 * (-(-num_values // self.num_rows) + len(self.schema.columns))

    @property
    def content_hash(self) -> str:
        """A hash over the footers, which hold statistics and sizes of all columns: cheap for logs of any size."""
        return hash_json([[file.num_bytes, file.footer_hash] for file in self.files])

    def validate(self, *, progress: Progress = no_progress) -> None:
        """Check every value once, in bounded memory; the first wrong one raises InputError."""
        done = 0
        for file in self.files:
            with _open_parquet(file.path) as opened:
                first_row = 0
                for number in range(opened.num_row_groups):
                    self._check_group(opened, number, file=file.path, first_row=first_row)
                    first_row += opened.metadata.row_group(number).num_rows
                    progress("check the log", done + first_row, self.num_rows)
            done += file.num_rows

    def _check_group(self, opened: pq.ParquetFile, number: int, *, file: str, first_row: int) -> None:
        """Check a few columns at a time: a reader holds a page or two of each column it reads."""
        names = self.schema.columns
        at_once = min(len(os.sched_getaffinity(0)), MAX_COLUMNS_AT_ONCE)
        batch_rows = max(1, min(VALIDATE_BATCH_ROWS, VALIDATE_BATCH_BYTES // self.row_bytes))
        for start in range(0, len(names), at_once):
            row, columns = first_row, names[start : start + at_once]
            for batch in opened.iter_batches(batch_size=batch_rows, row_groups=[number], columns=columns):
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if fault := _find_fault(column, name, self.schema):
                        where = f"{file}: column {name!r}, row {row + fault[0]} (counted from 0 in this file)"
                        raise InputError(f"{where}: {fault[1]}")
                row += batch.num_rows


def read_file(
    path: str, *, columns: Sequence[str] | None = None, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Stream a local or remote Parquet file; data that cannot be decoded raises InputError naming the file."""
    with _open_parquet(path) as file:
        yield from file.iter_batches(columns=columns, row_groups=row_groups)


@contextmanager
def _open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    try:
        with fsspec.open(path, "rb") as source:
            readable = source if is_remote(path) else path
            yield pq.ParquetFile(readable, buffer_size=READ_BYTES, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: the Parquet data cannot be read ({_first_line(error)})") from None


def _is_folder(path: str | Path) -> bool:
    filesystem, root = fsspec.core.url_to_fs(str(path))
    return bool(filesystem.isdir(root))


def _parquet_files(filesystem: Any, root: str) -> list[str]:
    """Every *.parquet below `root`, except vocabularies and in hidden folders (Spark's _temporary, our .out.tmp)."""
    found = []
    for name in filesystem.find(root):
        parts = name[len(root) :].strip("/").split("/")
        is_hidden = parts[0] == VOCABULARY_FOLDER or any(part.startswith((".", "_")) for part in parts)
        if name.endswith(".parquet") and not is_hidden:
            found.append(name)
    return found


def _open_file(filesystem: Any, path: str, schema: Schema, columns: Sequence[str]) -> LogFile:
    try:
        with filesystem.open(path, "rb") as source:
            num_bytes = source.seek(0, 2)
            source.seek(max(0, num_bytes - 8))
            length = int.from_bytes(source.read(4), "little")
            source.seek(max(0, num_bytes - 8 - length))
            footer_hash = hashlib.sha256(source.read(length)).hexdigest()
            source.seek(0)
            file = pq.ParquetFile(source)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file, or truncated ({_first_line(error)})") from None
    return LogFile(
        path=path,
        num_rows=file.metadata.num_rows,
        num_bytes=num_bytes,
        num_values=_count_values(file.metadata, schema),
        footer_hash=footer_hash,
        types=tuple(_check_column(file.schema_arrow, name, schema, path) for name in columns),
    )


def _count_values(footer: pq.FileMetaData, schema: Schema) -> int:
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    columns = [group.column(leaf) for group in groups for leaf in range(group.num_columns)]
    wanted = set(schema.columns)
    return sum(column.num_values for column in columns if column.path_in_schema.split(".")[0] in wanted)


def _check_column(found: pa.Schema, name: str, schema: Schema, path: str) -> pa.DataType:
    # DuckDB and Spark ignore case: with both `Item` and `item` in a file they could read the wrong one.
    alike = [column for column in found.names if column.casefold() == name.casefold()]
    if name not in alike:
        hint = f" (did you mean {alike[0]!r}?)" if alike else ""
        raise InputError(f"{path}: column {name!r} is missing{hint}; the file has {', '.join(found.names)}")
    if len(set(alike)) > 1:
        raise InputError(f"{path}: columns {', '.join(map(repr, alike))} differ only in case; rename all but one")
    if (count := Counter(found.names)[name]) > 1:
        raise InputError(f"{path}: column {name!r} occurs {count} times")
    column_type = found.field(name).type
    expected, is_fine = _expected_type(name, schema, column_type)
    if not is_fine:
        raise InputError(f"{path}: column {name!r} is {column_type}, expected {expected}")
    return column_type


def _expected_type(name: str, schema: Schema, found: pa.DataType) -> tuple[str, bool]:
    """The expected type of a column in words, and whether `found` converts to it without loss."""
    if name in ("session_id", "timestamp"):
        meaning = " (milliseconds since 1970)" if name == "timestamp" else ""
        return f"int64{meaning}", pa.types.is_integer(found)
    if name in schema.labels or schema.feature(name).kind == "dense":
        return "float32", pa.types.is_floating(found) or pa.types.is_integer(found) or pa.types.is_boolean(found)
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
    if schema.feature(name).kind == "sequence":
        return "list<int64>", is_list and pa.types.is_integer(found.value_type)
    return "list<int64> or int64", pa.types.is_integer(found.value_type if is_list else found)


WHOLE, SHARE, FINITE = "a whole number", "a number between 0 and 1", "a finite number"
# By kind of column: what is expected, which values are wrong, and what an error says about them.
CHECKS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "key": (WHOLE, lambda v: v > MAX_INT64, f"{{}} does not fit int64, expected at most {MAX_INT64}"),
    "label": (SHARE, lambda v: ~((v >= 0) & (v <= 1)), f"label {{:g}} is not {SHARE}"),
    "dense": (FINITE, lambda v: ~np.isfinite(v.astype(np.float32)), f"{{}} is not a finite float32, expected {FINITE}"),
}


def _find_fault(column: pa.Array, name: str, schema: Schema) -> tuple[int, str] | None:
    """The first wrong row of a batch, and what is wrong with it."""
    kinds = dict.fromkeys(("session_id", "timestamp"), "key") | dict.fromkeys(schema.labels, "label")
    kind = kinds.get(name) or schema.feature(name).kind
    if kind not in CHECKS:
        return _find_wrong_id(column, schema.feature(name))
    expected, find_wrong, message = CHECKS[kind]
    if column.null_count:
        return _first(column.is_null()), f"is null, expected {expected}"
    values = column.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        row = _first(find_wrong(values))
    return None if row < 0 else (row, message.format(values[row]))


def _find_wrong_id(column: pa.Array, feature: Feature) -> tuple[int, str] | None:
    is_list = not pa.types.is_integer(column.type)
    if column.null_count:
        expected = "a list of ids (an empty one is fine)" if is_list else "an id"
        return _first(column.is_null()), f"is null, expected {expected}"
    ids = column.flatten() if is_list else column
    if ids.null_count:
        return _row_of(column, _first(ids.is_null())), "holds a null inside the list, expected ids"
    if feature.transforms:  # they may bring any id into range, and the reader checks their results
        return None
    values = ids.to_numpy(zero_copy_only=False)
    wrong = _first((values < 0) | (values >= feature.num_rows))
    if wrong < 0:
        return None
    row = _row_of(column, wrong) if is_list else wrong
    problem = "is negative" if values[wrong] < 0 else "is out of range"
    return row, f"id {values[wrong]} {problem}, expected 0 <= id < {feature.num_rows} (num_rows of {feature.name!r})"


def _first(mask: pa.Array | np.ndarray) -> int:
    """The first position that is true, or -1."""
    bits = np.asarray(mask)
    position = int(bits.argmax()) if len(bits) else 0
    return position if len(bits) and bits[position] else -1


def _row_of(lists: pa.Array, position: int) -> int:
    """The row whose list contains the flattened value at `position`."""
    ends = np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
    return int(np.searchsorted(ends, position, side="right"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
