"""Finds and reads the data that a log is made from; if it is missing, says where to get it. Downloads nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from recmill.artifacts import InputError, is_remote
from recmill.data.log import RawLog
from recmill.data.sources.presets import PRESETS

DATA_DIR_VARIABLE = "RECMILL_DATA_DIR"


def locate_data(source: str, data: str | Path | None) -> Path:
    """The path given, or the first of the preset's candidates that exists below RECMILL_DATA_DIR."""
    candidates = PRESETS[source].candidates
    places = " or ".join(f"${DATA_DIR_VARIABLE}/{name}" for name in candidates)
    advice = f"get it from {PRESETS[source].home} and put it at {places}, or name it with --data"
    if data is not None:
        if not Path(data).exists():
            raise InputError(f"{data}: no such file or folder with the {source} data; {advice}")
        return Path(data)
    root = os.environ.get(DATA_DIR_VARIABLE)
    if not root:
        raise InputError(f"the {source} data is needed and {DATA_DIR_VARIABLE} is not set; {advice}")
    for name in candidates:
        if (Path(root) / name).exists():
            return Path(root) / name
    raise InputError(f"the {source} data was not found in {DATA_DIR_VARIABLE}={root}; {advice}")


def locate_parquet(path: str | Path | None) -> str | Path:
    """The path of a user's own log, which is used as it is: Parquet with `schema.json` beside it."""
    if path is None:
        raise InputError("the source 'parquet' needs the path of your data (--data); docs/data.md describes it")
    if not is_remote(path):
        RawLog.open(path)  # raises for a log that cannot be clustered
    return path


def read_whole_numbers(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of a Parquet or CSV file as int64; errors name the column."""
    try:
        if path.suffix == ".csv":
            table = pa_csv.read_csv(path)
        else:
            file = pq.ParquetFile(path)
            table = file.read(columns=[name for name in columns if name in file.schema_arrow.names])
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    arrays = []
    for name in columns:
        if name not in table.column_names:
            raise InputError(f"{path}: column {name!r} is missing; expected {', '.join(columns)}")
        column = table[name]
        if column.null_count:
            row = column.is_null().index(True).as_py()
            raise InputError(f"{path}: column {name!r}, row {row}: is null, expected a whole number")
        try:
            arrays.append(column.cast(pa.int64()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InputError(f"{path}: column {name!r} is {column.type}, expected whole numbers") from None
    return pa.table(arrays, names=list(columns))


def csv_error(file: str | Path, error: Exception, columns: Sequence[str]) -> InputError:
    """What Arrow's CSV parser says, with line and column. It counts lines only while it uses a single thread."""
    text = str(error).partition("\n")[0]
    if found := re.search(r"column #(\d+): Row #(\d+): .* invalid value '(.*)'", text):
        column, line, value = found.groups()
        return InputError(f"{file}, line {line}, column {columns[int(column)]}: is {value!r}, expected a whole number")
    if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text):
        line, expected, count = found.groups()
        return InputError(f"{file}, line {line}: has {count} fields, expected {expected}")
    return InputError(f"{file}: cannot be read ({text})")
