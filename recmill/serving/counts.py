"""How often the rows of each table are read, so that an export can store the most read ones first."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt

from recmill.artifacts import AccessProfile, InputError, join_path
from recmill.artifacts.places.columns import read_numbers
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.schema import Schema

Counts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # rows, how often each was read


def counts_of_profile(profile: AccessProfile, schema: Schema) -> dict[str, Counts]:
    """The counts of `recmill profile`, for every table of the schema."""
    for table in schema.tables:
        if table.name not in profile.tables:
            raise InputError(f"{profile.path}: has no table {table.name!r}, expected a profile of the model's data")
    return {t.name: _read(join_path(profile.path, f"counts/{t.name}.parquet")) for t in schema.tables}


def counts_of_vocabulary(checkpoint: str | Path, schema: Schema) -> dict[str, Counts]:
    """The counts in the vocabulary that goes with a checkpoint; tables that have none are left out."""
    found = {}
    for table in schema.tables:
        path = join_path(checkpoint, f"{VOCABULARY_FOLDER}/{table.name}.parquet")
        filesystem, root = fsspec.core.url_to_fs(path)
        if filesystem.exists(root):
            found[table.name] = _read(path)
    return found


def _read(path: str) -> Counts:
    rows, reads = read_numbers(path, ("row", "count"))
    # A row that several rare values share is listed once for each.
    own, places = np.unique(rows, return_inverse=True)
    return own, np.bincount(places, weights=reads, minlength=len(own)).astype(np.int64)
