"""Frappe: app usage with context, in the published Frappe_x1 split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import id_column, plain_column, read_whole_numbers
from recmill.data.sources.log_writer import write_log
from recmill.progress import Progress, no_progress

SPLITS = ("train", "valid", "test")
FIELDS = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
DIM = 16  # published results use 10; FBGEMM needs a multiple of 4


def convert_frappe(
    path: str | Path, *, out: str | Path, limit: int | None = None, progress: Progress = no_progress
) -> str | Path:
    """A raw log with one session per row; the row number is the time, so the schema's splits are the published ones.

    `path` is a folder with train, valid and test as .parquet or .csv; `limit` takes the first rows of each.
    """
    tables = {split: _read_split(Path(path), split).slice(0, limit) for split in SPLITS}
    table = pa.concat_tables(tables.values())
    first_row = np.cumsum([0] + [tables[split].num_rows for split in SPLITS])
    ids: dict[str, npt.NDArray[np.int64]] = {}
    features = []
    for name in FIELDS:
        values = table[name].to_numpy()
        # Frappe numbers the values of all fields in one sequence; the ids of each table start at 0.
        ids[name] = values - values.min()
        features.append(Feature(name=name, kind="sparse", num_rows=int(ids[name].max()) + 1, dim=DIM))
    schema = Schema(
        features=tuple(features),
        user="user",
        item="item",
        splits={"valid": int(first_row[1]), "test": int(first_row[2])},
        info={"source": "frappe", "num_sessions": table.num_rows},
    )
    row = plain_column(np.arange(table.num_rows))
    columns = [row, row, table["label"].combine_chunks().cast(pa.float32()), *map(id_column, ids.values())]
    progress("write samples", table.num_rows, table.num_rows)
    return write_log(out, schema, [pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())])


def _read_split(folder: Path, split: str) -> pa.Table:
    for suffix in ("parquet", "csv"):
        file = folder / f"{split}.{suffix}"
        if file.exists():
            break
    else:
        raise InputError(
            f"{folder}: holds no {split}.parquet or {split}.csv; the frappe data has train, valid and test"
        )
    table = read_whole_numbers(file, ("label", *FIELDS))
    if table.num_rows == 0:
        raise InputError(f"{file}: holds no rows")
    for name in table.column_names:
        low, high = pc.min_max(table[name]).as_py().values()
        if low < 0 or (name == "label" and high > 1):
            expected = "0 or 1" if name == "label" else "at least 0"
            raise InputError(f"{file}: column {name!r} holds values from {low} to {high}, expected {expected}")
    return table
