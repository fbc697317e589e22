"""Criteo's click logs: TSV with a label, 13 counts and 26 hashed categories."""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import csv_error, id_column, plain_column
from recmill.data.sources.log_writer import write_log
from recmill.data.transforms import mix_bits, spread_bits
from recmill.progress import Progress, no_progress

COUNTS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *COUNTS, *CATEGORIES)
DIM = 16
BLOCK_BYTES = 16 << 20
HEX_DIGITS = 8


def convert_criteo(
    path: str | Path,
    *,
    out: str | Path,
    num_rows: int = 200_000,
    limit: int | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """A raw log with one session per row and the row number as time; counts become log(1 + max(x, 0)), missing ones 0.

    Categories are hashed to [1, num_rows); a missing one is id 0. `path` is a TSV file, optionally .gz, or a folder
    whose files (train.txt, day_0.gz, ...) are read in natural order. Memory does not grow with the data.
    """
    features = [Feature(name=name, kind="dense") for name in COUNTS]
    features += [Feature(name=name, kind="sparse", num_rows=num_rows, dim=DIM) for name in CATEGORIES]
    schema = Schema(features=tuple(features), info={"source": "criteo"})
    num_read = 0

    def convert() -> Iterator[pa.RecordBatch]:
        nonlocal num_read
        for file in _list_files(Path(path)):
            first_line = 1
            for batch in _read_file(file):
                rows = batch if limit is None else batch.slice(0, limit - num_read)
                yield _convert_rows(rows, schema, first_row=num_read, where=f"{file}, line", first_line=first_line)
                first_line += rows.num_rows
                num_read += rows.num_rows
                progress("convert rows", num_read, limit or 0)
                if num_read == limit:
                    return

    return write_log(out, schema, convert(), info=lambda: {"num_sessions": num_read})


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    wanted = re.compile(r"(train|test|day_\d+|.*\.tsv|.*\.txt)(\.txt|\.tsv)?(\.gz)?")
    files = [file for file in path.iterdir() if file.is_file() and wanted.fullmatch(file.name)]
    if not files:
        raise InputError(f"{path}: holds no Criteo files (train.txt, day_0.gz, *.tsv, optionally .gz)")
    return sorted(
        files, key=lambda file: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]
    )


def _read_file(file: Path) -> Iterator[pa.RecordBatch]:
    types = {name: pa.string() if name in CATEGORIES else pa.int64() for name in COLUMNS}
    try:
        with pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None) as stream:
            yield from pa_csv.open_csv(
                stream,
                read_options=pa_csv.ReadOptions(column_names=list(COLUMNS), block_size=BLOCK_BYTES, use_threads=False),
                parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
                convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
            )
    except (pa.ArrowInvalid, OSError) as error:
        raise csv_error(file, error, COLUMNS) from None


def _convert_rows(
    batch: pa.RecordBatch, schema: Schema, *, first_row: int, where: str, first_line: int
) -> pa.RecordBatch:
    is_label = pc.fill_null(pc.is_in(batch["label"], value_set=pa.array([0, 1], pa.int64())), False)
    if (row := pc.index(is_label, False).as_py()) >= 0:
        raise InputError(f"{where} {first_line + row}, column label: is {batch['label'][row]}, expected 0 or 1")
    number = plain_column(np.arange(first_row, first_row + batch.num_rows))
    columns = [number, number, batch["label"].cast(pa.float32())]
    for name in COUNTS:
        counts = pc.fill_null(batch[name], 0).to_numpy(zero_copy_only=False)
        columns.append(plain_column(np.log1p(np.maximum(counts, 0).astype(np.float64)).astype(np.float32)))
    for salt, name in enumerate(CATEGORIES):
        ids = hash_category(batch[name], salt, schema.feature(name).num_rows)
        if ids is None:
            row = pc.index(pc.match_substring_regex(batch[name], "^[0-9a-fA-F]{8}$"), False).as_py()
            found = f"{where} {first_line + row}, column {name}: is {batch[name][row].as_py()!r}"
            raise InputError(f"{found}, expected 8 hexadecimal digits or nothing")
        columns.append(id_column(ids))
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())


def hash_category(column: pa.Array, salt: int, num_rows: int) -> npt.NDArray[np.int64] | None:
    """0 for a missing value, otherwise a hash in [1, num_rows); None if a value is not 8 hexadecimal digits."""
    known = column.drop_null()
    ids = np.zeros(len(column), np.int64)
    joined = pc.binary_join(pa.ListArray.from_arrays([0, len(known)], known), "")[0].as_buffer()
    with suppress(ValueError):
        if pc.all(pc.equal(pc.binary_length(known), HEX_DIGITS), min_count=0).as_py():
            values = np.frombuffer(unhexlify(joined), ">u4").astype(np.uint64)
            values += np.uint64(salt) << np.uint64(32)  # equal values of two columns get unrelated ids
            ids[column.is_valid().to_numpy(zero_copy_only=False)] = 1 + spread_bits(mix_bits(values), num_rows - 1)
            return ids
    return None
