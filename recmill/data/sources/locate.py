"""Where real data is looked for, and what a person is told who does not have it yet. Nothing is ever downloaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from recmill.artifacts import InputError

DATA_DIR_VARIABLE = "RECMILL_DATA_DIR"

HOMES = {
    "globo": "https://www.kaggle.com/datasets/gspmoreira/news-portal-user-interactions-by-globocom",
    "frappe": "https://huggingface.co/datasets/reczoo/Frappe_x1",
    "movielens": "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "criteo": "https://ailab.criteo.com/ressources",
}


def locate_data(source: str, data: str | Path | None, *, candidates: Sequence[str]) -> Path:
    """The path given, or the first of `candidates` that exists below RECMILL_DATA_DIR."""
    places = " or ".join(f"${DATA_DIR_VARIABLE}/{name}" for name in candidates)
    advice = f"get it from {HOMES[source]} and put it at {places}, or name it with --data"
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


def read_whole_numbers(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of a Parquet or CSV file as int64; what is missing or no number names its column."""
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
