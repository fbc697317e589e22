"""How much the lists of a session repeat: exact statistics per feature, in one pass and bounded memory.

session          A        A        A        A        B
list           [7, 9]   [7, 9]   [9, 4]   [7, 9]   [7, 9]
as previous              same     shift
distinct        1                   2                 3       -> 5 rows / 3 distinct lists = dedup factor 1.67

Lists are compared as they are stored, before the transforms of the schema: that is what the deduplicated layout and the
reader compare, and lists that are equal stay equal. Access counts are of ids after transforms: the rows of the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recmill.artifacts import Dataset
from recmill.artifacts.profile import FeatureDuplication
from recmill.data.dataset import read_rows, row_schema
from recmill.data.schema import Schema
from recmill.data.storage.writer import cut_row_groups
from recmill.profiling.counting import query_out_of_core
from recmill.profiling.list_compare import ListColumn, shifted_by_one
from recmill.profiling.sampling import Group, by_file
from recmill.progress import Progress

BATCH_SIZES = (1024, 4096, 16384)
CHUNK_ROWS = 65_536


class Duplication(NamedTuple):
    """How much lists repeat: for every feature, with the sessions that were counted."""

    num_sessions: int
    samples_per_session: float
    features: dict[str, FeatureDuplication]


def count_duplication(
    dataset: Dataset,
    *,
    split: str | None,
    groups: Sequence[Group],
    sample: float,
    progress: Progress,
) -> Duplication:
    """Sessions, and how much the lists of every feature repeat, over the given row groups.

    Rows stored in time order are put in session order first (on disk); a sample of them is a sample of
    sessions, because row groups cut sessions there. In-batch factors are those of the stored order.
    """
    schema = Schema.load(dataset.path)
    total = sum(rows for _, _, rows in groups)
    stored = read_rows(dataset, row_groups=by_file(groups))
    is_clustered = dataset.layout != "time"
    counter = DuplicationCounter(schema, batch_sizes=BATCH_SIZES, counts_sessions=is_clustered)
    counter.add_all(stored, progress, total)
    if is_clustered:
        return counter.figures(counter)
    sessions = DuplicationCounter(schema, batch_sizes=(), counts_sessions=True)
    sessions.add_all(_session_order(dataset, split, sample), progress, total)
    return sessions.figures(counter)


def _session_order(dataset: Dataset, split: str | None, sample: float) -> Iterator[pa.RecordBatch]:
    """The rows of a share of the sessions, sorted by session and time."""
    schema = row_schema(dataset)
    rows = (_keep_sessions(batch, sample) for batch in read_rows(dataset, split=split))
    query = "SELECT * FROM log ORDER BY session_id, timestamp"
    ordered = query_out_of_core(schema, rows, query, rows_per_batch=CHUNK_ROWS)
    for group in cut_row_groups(ordered, schema=schema, layout="session", rows_per_group=CHUNK_ROWS):
        yield from group.rows.to_batches()


def _keep_sessions(batch: pa.RecordBatch, sample: float) -> pa.RecordBatch:
    if sample == 1:
        return batch
    scattered = batch.column("session_id").to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return batch.filter(pa.array((scattered >> np.uint64(11)) < int(sample * 2**53)))


class DuplicationCounter:
    """Takes rows in order and counts repeats inside sessions and inside batches."""

    def __init__(self, schema: Schema, *, batch_sizes: Sequence[int], counts_sessions: bool) -> None:
        self.schema, self.counts_sessions = schema, counts_sessions
        # Chunks end where batches of every size end; later rows wait for the next chunk.
        self.step = math.lcm(*batch_sizes)
        self.chunk_rows = max(CHUNK_ROWS, self.step)
        self.num_rows = self.num_sessions = self.num_pairs = 0
        self.sums = {feature.name: _Sums(batch_sizes) for feature in schema.features}
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0
        self._num_counted = 0  # of the pending rows, those whose sessions are counted already

    def add_all(self, batches: Iterable[pa.RecordBatch], progress: Progress, total: int) -> None:
        done, enough = 0, self.chunk_rows
        for batch in batches:
            self._pending.append(batch)
            self._num_pending += batch.num_rows
            done += batch.num_rows
            if self._num_pending >= enough:
                self._process(is_end=False)
                enough = max(self.chunk_rows, 2 * self._num_pending)
            progress("compare lists", done, total)
        if self._pending:
            self._process(is_end=True)

    def _process(self, *, is_end: bool) -> None:
        table = pa.Table.from_batches(self._pending).combine_chunks()
        session = table.column("session_id").to_numpy()
        starts = np.flatnonzero(np.diff(session)) + 1
        # The last session may continue in the next batch.
        closed = table.num_rows if is_end or not self.counts_sessions else int(starts[-1]) if len(starts) else 0
        complete = closed if is_end else closed // self.step * self.step
        follows = np.zeros(closed, bool)  # this row and the one before belong to one session
        follows[1:] = session[1:closed] == session[: closed - 1] if closed else False
        first = min(self._num_counted, closed)
        self.num_rows += closed - first
        self.num_sessions += int((~follows[first:]).sum())
        self.num_pairs += int(follows[first:].sum())
        for feature in self.schema.features:
            lists = ListColumn.from_arrow(table.column(feature.name).slice(0, closed))
            self.sums[feature.name].add(
                lists, follows, first=first, complete=complete, counts_sessions=self.counts_sessions
            )
        rest = table.slice(complete)
        self._pending, self._num_pending, self._num_counted = rest.to_batches(), rest.num_rows, closed - complete

    def figures(self, stored: DuplicationCounter) -> Duplication:
        """The statistics; in-batch factors are taken from `stored`."""
        samples_per_session = self.num_rows / max(1, self.num_sessions)
        features = {}
        for feature in self.schema.features:
            sums, batches = self.sums[feature.name], stored.sums[feature.name].num_distinct_batch
            features[feature.name] = FeatureDuplication(
                kind=feature.kind,
                mean_length=sums.num_values / max(1, self.num_rows),
                samples_per_session=samples_per_session,
                same_as_previous=sums.num_same / self.num_pairs if self.num_pairs else None,
                shifted_by_one=sums.num_shifted / self.num_pairs if self.num_pairs else None,
                distinct_per_session=sums.num_distinct / max(1, self.num_sessions),
                dedup_factor=self.num_rows / max(1, sums.num_distinct),
                batch_dedup_factor={size: stored.num_rows / max(1, n) for size, n in batches.items()},
            )
        return Duplication(num_sessions=self.num_sessions, samples_per_session=samples_per_session, features=features)


class _Sums:
    """Counts of one feature."""

    def __init__(self, batch_sizes: Sequence[int]) -> None:
        self.num_values = self.num_same = self.num_shifted = self.num_distinct = 0
        self.num_distinct_batch = dict.fromkeys(batch_sizes, 0)

    def add(self, lists: ListColumn, follows: np.ndarray, *, first: int, complete: int, counts_sessions: bool) -> None:
        """Count rows [first:] inside sessions, and rows [:complete], where batches of all sizes end, inside batches."""
        if len(lists) == 0:
            return
        self.num_values += int(lists.offsets[-1] - lists.offsets[first])
        same = lists.same_as_previous_N
        if counts_sessions:
            repeats = follows & same
            self.num_same += int(repeats[first:].sum())
            self.num_shifted += shifted_by_one(lists, np.flatnonzero(follows & ~same), first=first)
            heads = np.flatnonzero(~repeats)
            self.num_distinct += lists.count_distinct(np.cumsum(~follows), heads[heads >= first])
        for size in self.num_distinct_batch:
            starts_batch = np.arange(complete) % size == 0
            heads = np.flatnonzero(starts_batch | ~same[:complete])
            self.num_distinct_batch[size] += lists.count_distinct(np.arange(complete) // size, heads)
