"""Columns of the small Parquet files of artifacts: rows, slots, tiers and counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts.places.stores import InputError, is_remote

SMALL_ROWS = 100_000


def read_numbers(path: str | Path, names: Sequence[str], *, below: int | None = None) -> list[npt.NDArray[np.int64]]:
    """The columns, all of whole numbers of at least 0; those of the first are less than `below`.

    Small files are read without threads, and all without Arrow's dataset: both would take longer than the file.
    """
    try:
        if is_remote(path):
            with fsspec.open(str(path), "rb") as stored, pq.ParquetFile(stored) as file:
                table = _read(file, names)
        else:
            with pq.ParquetFile(path) as file:
                table = _read(file, names)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    return [check_numbers(table, name, path, below=below if name == names[0] else None) for name in names]


def _read(file: pq.ParquetFile, names: Sequence[str]) -> pa.Table:
    known = [name for name in names if name in file.schema_arrow.names]
    return file.read(columns=known, use_threads=file.metadata.num_rows > SMALL_ROWS)


def check_numbers(
    table: pa.Table | pa.RecordBatch, name: str, path: str | Path, *, below: int | None = None
) -> npt.NDArray[np.int64]:
    """A column as int64, if it holds whole numbers of at least 0 and below a bound, and nothing else."""
    if name not in table.schema.names:
        raise InputError(f"{path}: has no column {name!r}")
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise InputError(f"{path}: column {name!r} must hold whole numbers without gaps, is {column.type}")
    values: npt.NDArray[np.int64] = column.to_numpy().astype(np.int64, copy=False)
    if len(values) and (values.min() < 0 or (below is not None and values.max() >= below)):
        end = "" if below is None else f" and less than {below}"
        wrong = values.min() if values.min() < 0 else values.max()
        raise InputError(f"{path}: column {name!r} holds {wrong}, expected at least 0{end}")
    return values
