"""Cuts a stream of events, sorted by user and time, into blocks of whole users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from recmill.data.preparation.samples.attributes import Column
from recmill.data.sources.lists import numbers_of


def cut_blocks(batches: Iterable[pa.RecordBatch], block_events: int) -> Iterator[dict[str, Column]]:
    """The columns of at least `block_events` events at a time; a user is never divided."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(own.num_rows for own in waiting) < block_events:
            continue
        table = pa.Table.from_batches(waiting)
        users = numbers_of(table["user"])
        cut = int(np.searchsorted(users, users[-1]))  # the last user may go on in the next batch
        if cut:
            yield arrays_of(table.slice(0, cut))
            waiting = table.slice(cut).to_batches()
    if any(own.num_rows for own in waiting):
        yield arrays_of(pa.Table.from_batches(waiting))


def arrays_of(table: pa.Table) -> dict[str, Column]:
    return {name: numbers_of(table[name]) for name in table.column_names}
