"""How often the rows of a table are read per step, as classes of rows that are read equally often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import AccessProfile, InputError, join_path, local_folder
from recmill.artifacts.places.columns import check_numbers
from recmill.data.schema import Schema, Table
from recmill.planning.dedup import choose_features

# C = classes of rows with one count
MIN_LANES = 8  # at least this many per epoch: a lane of the reader is a run of rows in stored order
COUNT_BLOCK = 1 << 20
MAX_CLASSES = 2048
CLASS_WIDTH = 0.005  # relative difference of counts inside a merged class
MAX_REPEATS, NUM_HALVINGS = 1024.0, 40  # of the search in _repeats_in_time


@dataclass(frozen=True, kw_only=True)
class TableReads:
    """One table: its shape, and its rows by falling number of reads."""

    name: str
    num_rows: int
    dim: int
    is_pooled: bool
    rows_C: np.ndarray  # how many rows are in a class; adds up to num_rows, the last class is never read
    reads_C: np.ndarray  # expected reads of one such row per rank and step, without repeats inside sessions
    ids_per_rank: float  # ids that a rank looks up per step, repeats included
    bags_per_rank: float  # lists pooled for a rank per step over all features; equal lists of a feature count once
    least_counts_C: np.ndarray  # the least count of a row in the class
    bag_ids_per_rank: float | None = None  # ids of those lists, if they are fewer than ids_per_rank


def load_reads(profile: AccessProfile, schema: Schema, *, batch_size: int, world_size: int) -> list[TableReads]:
    """How steps of `batch_size` samples, divided over `world_size` ranks, read the tables of a profile."""
    where = join_path(profile.path, profile.manifest_name)
    if not profile.num_samples:
        raise InputError(f"{where}: counts no samples, so it cannot say how often a row is read")
    unknown = sorted({table.name for table in schema.tables} - set(profile.tables))
    if unknown:
        raise InputError(f"{where}: knows nothing of table(s) {', '.join(unknown)}, which schema.json names")
    num_samples, samples_per_rank = profile.num_samples, batch_size / world_size
    features = choose_features(profile, schema, batch_size=batch_size)
    deduplicated = {name: found for name, found in features.items() if found.is_deduplicated}
    found = []
    with local_folder(profile.path) as folder:
        samples = folder / "samples.parquet"
        sampled = pq.read_table(samples) if samples.exists() else None
        for table in schema.tables:
            counts, rows, least = read_classes(folder / "counts" / f"{table.name}.parquet", table.num_rows)
            if profile.tables[table.name].num_accesses and not counts[0]:
                raise InputError(
                    f"{folder}/counts/{table.name}.parquet: holds no counts, profile.json says it was read"
                )
            repeats = _repeats(profile, table, sampled, batch_size / lanes_of(world_size), counts=counts, rows=rows)
            known = [profile.duplication.get(name) for name in table.features]
            lengths = [1.0 if entry is None else entry.mean_length for entry in known]
            lists = [(length, deduplicated.get(name)) for name, length in zip(table.features, lengths, strict=True)]
            kept = sum(length / (own.id_factor if own else 1.0) for length, own in lists) / (sum(lengths) or 1.0)
            ids_per_rank = float((counts * rows).sum()) / num_samples * samples_per_rank
            ids_per_rank = ids_per_rank if counts[0] else sum(lengths) * samples_per_rank
            reads = TableReads(
                name=table.name,
                num_rows=table.num_rows,
                dim=table.dim,
                is_pooled=table.name not in schema.sequence_tables,
                rows_C=rows,
                reads_C=counts * (samples_per_rank / num_samples / repeats),
                ids_per_rank=ids_per_rank,
                bag_ids_per_rank=ids_per_rank * kept,
                bags_per_rank=sum(samples_per_rank / (own.factor if own else 1.0) for _, own in lists),
                least_counts_C=least,
            )
            found.append(reads)
    return found


def lanes_of(world_size: int) -> int:
    """Number of lanes that a global batch draws from."""
    return world_size * -(-MIN_LANES // world_size)


def read_classes(path: Path, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean count, number of rows, least count) of the classes, most read first.

    Rows that the file leaves out were never read: they are the last class.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; the profile has no counts for this table, run `recmill profile` again")
    counts: dict[int, int] = {}
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=COUNT_BLOCK, columns=["count"]):
            values, number = np.unique(check_numbers(batch, "count", path), return_counts=True)
            for value, rows in zip(values.tolist(), number.tolist(), strict=True):
                counts[value] = counts.get(value, 0) + rows
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as counts ({' '.join(str(error).split())[:200]})") from None
    read = sum(rows for count, rows in counts.items() if count > 0)
    if read > num_rows or min(counts, default=0) < 0:
        raise InputError(f"{path}: counts {read:,} rows of a table of {num_rows:,}, or a negative count")
    counts[0] = num_rows - read
    ordered = sorted((count, rows) for count, rows in counts.items() if rows)[::-1]
    values = np.array([count for count, _ in ordered], float)
    return merge_classes(values, np.array([rows for _, rows in ordered], np.int64))


def merge_classes(counts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge classes of nearly equal counts, so that a table has at most a few thousand."""
    if len(counts) <= MAX_CLASSES:
        return counts, rows, counts
    level = np.where(counts > 0, np.floor(np.log(np.maximum(counts, 1)) / CLASS_WIDTH), -1.0)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(level) != 0]))
    merged = np.add.reduceat(rows, starts)
    return np.add.reduceat(counts * rows, starts) / merged, merged, np.minimum.reduceat(counts, starts)


def _repeats(
    profile: AccessProfile,
    table: Table,
    sampled: pa.Table | None,
    run_rows: float,
    *,
    counts: np.ndarray,
    rows: np.ndarray,
) -> float:
    """By how much the repeats of ids inside sessions reduce the distinct rows that a rank reads.

    A batch holds whole sessions unless the log is in time order, where only neighbours in time are alike. Measured on
    the profile's sample of sessions.
    """
    if profile.layout == "time":
        return _repeats_in_time(profile.tables[table.name].distinct_per_step, counts, rows, profile.num_samples)
    if sampled is not None and table.name in sampled.column_names and sampled.num_rows:
        return session_repeats(sampled, table.name, run_rows)
    return 1.0


def _repeats_in_time(
    distinct_per_step: Mapping[int, float], counts: np.ndarray, rows: np.ndarray, num_samples: int
) -> float:
    """The factor to divide reads by so that they touch as many rows as the profile measured per batch."""
    measured = {size: found for size, found in distinct_per_step.items() if found}
    if not measured or not counts[0]:
        return 1.0
    size = min(measured)
    low, high = 1.0, MAX_REPEATS
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        touched = float(-np.expm1(-counts * (size / num_samples / middle)) @ rows)
        low, high = (middle, high) if touched > measured[size] else (low, middle)
    return low


def session_repeats(sampled: pa.Table, table: str, run_rows: float) -> float:
    """Ids of a table over its distinct ids per session; sessions are cut after `run_rows` samples."""
    lists = sampled.column(table).combine_chunks()
    session = sampled.column("session_id").to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], session[1:] != session[:-1]]))
    place = np.arange(len(session)) - np.repeat(starts, np.diff([*starts, len(session)]))
    run = np.cumsum(np.concatenate([[True], session[1:] != session[:-1]]) | (place % max(int(run_rows), 1) == 0))
    ids = lists.flatten().to_numpy()
    runs = np.repeat(run, pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64))
    if not len(ids):
        return 1.0
    return len(ids) / len(np.unique(np.stack([runs, ids]), axis=1).T)
