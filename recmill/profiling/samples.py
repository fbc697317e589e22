"""A random sample of whole sessions with the rows they read, to evaluate which samples a set of rows serves.

Counts say how often a row is read, not which rows are read together. `samples.parquet` of a profile has one record per
sample: `session_id` and, per table, the rows that all features of the sample read, after transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import AccessProfile, Dataset, InputError, join_path
from recmill.data.dataset import read_rows
from recmill.data.ikjt.distinct import take_lists
from recmill.data.log import read_file
from recmill.data.schema import Schema, Table
from recmill.data.transforms import Transforms
from recmill.profiling.sampling import Group

SAMPLES_FILE = "samples.parquet"
MAX_SAMPLES = 20_000
MAX_GROUPS = 32  # row groups to read: sessions of the same group resemble each other
SEED = 1

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRows:
    """Rows of one table that each of N samples reads: values[offsets[n] : offsets[n + 1]]."""

    values: IdArray
    offsets: IdArray


def write_samples(folder: Path, dataset: Dataset, schema: Schema, groups: Sequence[Group]) -> int:
    """Write `samples.parquet` from random sessions of random row groups; returns the number of samples."""
    rng = np.random.default_rng(SEED)
    filled = [group for group in groups if group[2]]
    chosen = [filled[place] for place in rng.permutation(len(filled))[:MAX_GROUPS].tolist()]
    quota = -(-MAX_SAMPLES // max(1, len(chosen)))
    tables = [_sample_group(dataset, schema, group, quota, rng) for group in chosen]
    form = pa.schema([("session_id", pa.int64()), *((table.name, pa.list_(pa.int64())) for table in schema.tables)])
    whole = pa.concat_tables(tables) if tables else form.empty_table()
    pq.write_table(whole.cast(form), folder / SAMPLES_FILE, compression="zstd")
    return int(whole.num_rows)


def load_samples(profile: AccessProfile, tables: Sequence[Table]) -> tuple[IdArray, dict[str, SampledRows]]:
    """The session of every sample and, per table, the rows that samples read."""
    path = join_path(profile.path, SAMPLES_FILE)
    if SAMPLES_FILE not in {entry.name for entry in profile.files}:
        raise InputError(f"{profile.path}: holds no {SAMPLES_FILE}; profile the dataset again")
    found = pa.Table.from_batches(list(read_file(path, columns=["session_id", *(table.name for table in tables)])))
    rows = {}
    for table in tables:
        lists = found.column(table.name).combine_chunks()
        rows[table.name] = SampledRows(
            values=lists.flatten().to_numpy(), offsets=_offsets(pc.list_value_length(lists).to_numpy())
        )
    return found.column("session_id").to_numpy(), rows


def _sample_group(dataset: Dataset, schema: Schema, group: Group, quota: int, rng: np.random.Generator) -> pa.Table:
    features = [name for table in schema.tables for name in table.features]
    batches = read_rows(dataset, columns=["session_id", *features], row_groups={group[0]: [group[1]]})
    rows = pa.Table.from_batches(list(batches)).combine_chunks()
    sessions = rows.column("session_id").to_numpy()
    names, counts = np.unique(sessions, return_counts=True)
    order = rng.permutation(len(names))
    num_taken = max(1, int(np.searchsorted(np.cumsum(counts[order]), quota, side="right")))
    rows = rows.filter(pa.array(np.isin(sessions, names[order[:num_taken]])))
    transforms = Transforms(schema)
    columns = {"session_id": rows.column("session_id")}
    for table in schema.tables:
        lists = [rows_read(transforms, schema, name, rows.column(name).combine_chunks()) for name in table.features]
        columns[table.name] = _join_lists(lists)
    return pa.table(columns)


def rows_read(transforms: Transforms, schema: Schema, name: str, lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) of a feature's lists after the transforms that the schema declares."""
    ids: np.ndarray = lists.flatten().to_numpy()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int32)
    if not schema.feature(name).transforms:
        return ids, lengths
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    values, starts, lengths = transforms.lists(name, ids, starts, lengths)
    return take_lists(values, starts, lengths), lengths


def _join_lists(lists: Sequence[tuple[IdArray, npt.NDArray[np.int64]]]) -> pa.ListArray:
    """One list per sample from the lists of several features."""
    owners = np.concatenate([np.repeat(np.arange(len(lengths)), lengths) for _, lengths in lists])
    order = np.argsort(owners, kind="stable")
    ids = np.concatenate([own for own, _ in lists])[order]
    total = np.sum([lengths for _, lengths in lists], axis=0)
    return pa.ListArray.from_arrays(pa.array(_offsets(total), pa.int32()), pa.array(ids))


def _offsets(lengths: npt.NDArray[np.integer]) -> IdArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
