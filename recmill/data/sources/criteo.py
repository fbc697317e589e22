"""Criteo's click logs: TSV with a label, 13 counts and 26 hashed categories."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import IntArray, id_column, plain_column
from recmill.data.sources.log_writer import write_log
from recmill.progress import Progress, no_progress

COUNTS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *COUNTS, *CATEGORIES)
BLOCK_BYTES = 16 << 20
HEX_DIGITS = 8

_DIGIT_VALUE = np.full(256, 255, dtype=np.uint8)
for _characters in ("0123456789abcdef", "0123456789ABCDEF"):
    for _value, _character in enumerate(_characters):
        _DIGIT_VALUE[ord(_character)] = _value


def convert_criteo(
    path: str | Path,
    *,
    out: str | Path,
    num_rows: int = 200_000,
    dim: int = 16,
    limit: int | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """A raw log with one session per row and the row number as time; counts become log(1 + max(x, 0)), missing ones 0.

    Categories are hashed to [1, num_rows); a missing one is id 0. `path` is a TSV file, optionally .gz, or a folder
    whose files (train.txt, day_0.gz, ...) are read in natural order. Memory does not grow with the data.
    """
    features = [Feature(name=name, kind="dense") for name in COUNTS]
    features += [Feature(name=name, kind="sparse", num_rows=num_rows, dim=dim) for name in CATEGORIES]
    schema = Schema(features=tuple(features), info={"source": "criteo"})
    num_read = 0
    with write_log(out, schema) as writer:
        for file in _list_files(Path(path)):
            if limit is not None and num_read >= limit:
                break
            for first_line, batch in _read_file(file, None if limit is None else limit - num_read):
                row = np.arange(num_read, num_read + batch.num_rows)
                columns = [plain_column(row), plain_column(row), _label(batch["label"], file, first_line)]
                columns += [_count(batch[name]) for name in COUNTS]
                columns += [
                    id_column(_hash_category(batch[name], salt, num_rows, file=file, first_line=first_line, name=name))
                    for salt, name in enumerate(CATEGORIES)
                ]
                writer.write(pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema()))
                num_read += batch.num_rows
                progress("convert rows", num_read, limit or 0)
        writer.info["num_sessions"] = num_read
    return out


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


def _read_file(file: Path, limit: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of at most `limit` rows in all, each with the number of its first line."""
    types = {name: pa.string() if name in CATEGORIES else pa.int64() for name in COLUMNS}
    line = 1
    try:
        with pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None) as stream:
            reader = pa_csv.open_csv(
                stream,
                read_options=pa_csv.ReadOptions(column_names=list(COLUMNS), block_size=BLOCK_BYTES, use_threads=False),
                parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
                convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
            )
            for batch in reader:
                kept = batch if limit is None else batch.slice(0, limit - (line - 1))
                if kept.num_rows:
                    yield line, kept
                line += batch.num_rows
                if limit is not None and line > limit:
                    return
    except pa.ArrowInvalid as error:
        _explain_bad_line(file, error)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error})") from None


def _explain_bad_line(file: Path, error: Exception) -> None:
    """Raise for the line and column that the fast parser could not read, by reading again slowly."""
    with gzip.open(file, "rt", errors="replace") if file.suffix == ".gz" else open(file, errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            parts = line.rstrip("\r\n").split("\t")
            if len(parts) != len(COLUMNS):
                raise InputError(
                    f"{file}, line {number}: has {len(parts)} tab-separated fields, expected {len(COLUMNS)} "
                    "(a label, 13 counts, 26 categories)"
                ) from None
            for name, text in zip(COLUMNS, parts[: 1 + len(COUNTS)], strict=False):
                if text and not re.fullmatch(r"-?\d{1,18}", text):
                    raise InputError(
                        f"{file}, line {number}, column {name}: is {text!r}, expected a whole number"
                    ) from None
    raise InputError(f"{file}: cannot be read as Criteo TSV ({str(error).splitlines()[0]})") from None


def _label(column: pa.Array, file: Path, first_line: int) -> pa.Array:
    is_good = pc.fill_null(pc.is_in(column, value_set=pa.array([0, 1], pa.int64())), False)
    row = pc.index(is_good, False).as_py()
    if row >= 0:
        raise InputError(f"{file}, line {first_line + row}, column label: is {column[row]}, expected 0 or 1")
    return column.cast(pa.float32())


def _count(column: pa.Array) -> pa.Array:
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    return plain_column(np.log1p(np.maximum(values, 0).astype(np.float64)).astype(np.float32))


def _hash_category(
    column: pa.Array, salt: int, num_rows: int, *, file: Path, first_line: int, name: str
) -> npt.NDArray[np.int64]:
    """Ids of 8-digit hexadecimal values: 0 for a missing one, otherwise a hash in [1, num_rows)."""
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    has_length = pc.fill_null(pc.equal(pc.binary_length(column), HEX_DIGITS), True)
    row = pc.index(has_length, False).as_py()
    ids = np.zeros(len(column), dtype=np.int64)
    if row < 0:
        digits = _DIGIT_VALUE[_characters_of(column.drop_null())].reshape(-1, HEX_DIGITS)
        bad = np.flatnonzero((digits == 255).any(axis=1))
        if len(bad) == 0:
            ids[~is_missing] = _hash_to_range(digits, salt, num_rows)
            return ids
        row = int(np.flatnonzero(~is_missing)[bad[0]])
    value = column[row].as_py()
    raise InputError(
        f"{file}, line {first_line + row}, column {name}: is {value!r}, expected 8 hexadecimal digits or nothing"
    )


def _characters_of(strings: pa.StringArray) -> npt.NDArray[np.uint8]:
    """The bytes of all strings, one after another."""
    _, offsets, data = strings.buffers()
    if data is None or len(strings) == 0:
        return np.zeros(0, dtype=np.uint8)
    bounds = np.frombuffer(offsets, dtype=np.int32)[strings.offset : strings.offset + len(strings) + 1]
    return np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]]


def _hash_to_range(digits: IntArray, salt: int, num_rows: int) -> npt.NDArray[np.int64]:
    shifts = np.arange(HEX_DIGITS - 1, -1, -1, dtype=np.uint64) * np.uint64(4)
    value = (digits.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)
    value += np.uint64(salt) << np.uint64(32)  # equal values of two columns get unrelated ids
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)
    value ^= value >> np.uint64(31)
    # The high bits of a product spread over the range without a division.
    spread = ((value >> np.uint64(32)) * np.uint64(max(num_rows - 1, 1))) >> np.uint64(32)
    ids: npt.NDArray[np.int64] = np.minimum(1 + spread.astype(np.int64), num_rows - 1)
    return ids
