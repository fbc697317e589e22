"""What a thread of the engine has in hand: a row group in one of its stages, or a batch to cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recmill.data.ikjt.batch import RowBlock
from recmill.data.ikjt.cutting import CutBlock
from recmill.data.ingest.schedule import Cut, Entry

FOLLOWING = {"read": "decode", "decode": "transform"}


@dataclass(kw_only=True)
class Job:
    """A row group on its way, with what the last stage made of it and what it is charged."""

    entry: Entry
    payload: Any = None
    charge_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Assembly:
    cut: Cut
    slices: list[tuple[RowBlock | CutBlock, int, int]]
    num_bytes: int


Task = tuple[str, Job | Assembly]  # stage and what to do in it
