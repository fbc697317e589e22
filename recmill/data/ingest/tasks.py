"""What worker threads process: row groups on their way through the stages, and batches to assemble from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recmill.data.ikjt.batch import BlockSlice
from recmill.data.ingest.schedule import Cut, Entry
from recmill.data.ingest.statistics import Taken


@dataclass(kw_only=True)
class Job:
    """A row group in progress: the result of its last stage and the bytes it is charged."""

    entry: Entry
    payload: Any = None
    charge_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A batch to assemble from rows [start, stop) of transformed row groups; `num_bytes` is an upper bound."""

    cut: Cut
    slices: list[BlockSlice]
    num_bytes: int


Task = tuple[str, Job | Assembly]  # stage and the item to process in it


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a stage made of an item: its rows and bytes, and the time taken; or the error."""

    value: Any = None
    rows: int = 0
    num_bytes: int = 0
    taken: Taken | None = None
    error: BaseException | None = None
