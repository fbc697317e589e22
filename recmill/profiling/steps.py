"""How many different rows of a table a rank reads per step, measured on batches as training makes them.

A batch takes consecutive rows of several lanes (see recmill/data/ingest). A few batches are measured, at evenly spaced
positions of the lanes; only the row groups they touch are read, and only the distinct ids of every piece are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from recmill.artifacts import Dataset
from recmill.data.dataset import read_rows
from recmill.data.schema import Schema
from recmill.profiling.sampling import Group

NUM_LANES = 8
NUM_BATCHES = 4  # of each size

# A piece of a batch: its size, its number among the batches of that size, its first row and the row after its last.
Piece = tuple[int, int, int, int]
# Ids that the lists of a feature read, and how many each list reads.
ReadLists = Callable[[str, pa.Array], tuple[np.ndarray, np.ndarray]]


def distinct_per_step(
    dataset: Dataset, schema: Schema, groups: Sequence[Group], batch_sizes: Sequence[int], read_lists: ReadLists
) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """By table: the mean number of ids, and of distinct ids, that batches of each size read."""
    num_rows = sum(rows for _, _, rows in groups)
    sizes = [size for size in batch_sizes if size <= num_rows]
    pieces, first = choose_pieces(num_rows, sizes), 0
    found: dict[tuple[str, int, int], list[np.ndarray]] = {}
    num_ids: Counter[tuple[str, int]] = Counter()
    for file, number, rows in groups:
        inside = [piece for piece in pieces if piece[2] < first + rows and piece[3] > first]
        columns = [feature.name for feature in schema.id_features]
        for name, lists in _read_group(dataset, file, number, columns) if inside else ():
            table, (ids, lengths) = schema.feature(name).table, read_lists(name, lists)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            for size, batch, start, stop in inside:
                low, high = ends[max(start - first, 0)], ends[min(stop - first, rows)]
                found.setdefault((table, size, batch), []).append(np.unique(ids[low:high]))
                num_ids[table, size] += int(high - low)
        first += rows
    num_distinct: dict[tuple[str, int], list[int]] = {}
    for (table, size, _), own in found.items():
        num_distinct.setdefault((table, size), []).append(len(np.unique(np.concatenate(own))))
    return {
        table.name: (
            {size: num_ids[table.name, size] / len(num_distinct[table.name, size]) for size in sizes},
            {size: float(np.mean(num_distinct[table.name, size])) for size in sizes},
        )
        for table in schema.tables
    }


def _read_group(dataset: Dataset, file: str, number: int, columns: Sequence[str]) -> Iterator[tuple[str, pa.Array]]:
    whole = pa.Table.from_batches(list(read_rows(dataset, columns=columns, row_groups={file: [number]})))
    for name in columns:
        yield name, pa.concat_arrays(whole.column(name).chunks)


def choose_pieces(num_rows: int, batch_sizes: Sequence[int]) -> list[Piece]:
    """Where the rows of NUM_BATCHES batches of each size are in the stored order."""
    pieces = []
    for size in batch_sizes:
        num_batches = min(NUM_BATCHES, max(1, num_rows // size))
        for lane in range(NUM_LANES):
            low, high = lane * num_rows // NUM_LANES, (lane + 1) * num_rows // NUM_LANES
            quota = (lane + 1) * size // NUM_LANES - lane * size // NUM_LANES
            for batch in range(num_batches):
                start = min(low + batch * (high - low) // num_batches, high - quota)
                if quota:
                    pieces.append((size, batch, max(start, 0), max(start, 0) + quota))
    return pieces
