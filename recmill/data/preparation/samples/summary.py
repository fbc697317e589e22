"""What is known about the samples when all are made: their number, sessions and splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recmill.artifacts import InputError
from recmill.data.preparation.samples.blocks import Samples
from recmill.data.preparation.samples.timelines import Int64s
from recmill.data.preparation.spec import parse_time
from recmill.data.sources.lists import starts_of_runs


class SessionStarts:
    """The first time of every session, collected while samples are made."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._blocks: list[Int64s] = []

    def add(self, samples: Samples) -> None:
        session_S = samples.columns["session_id"]
        self.add_times(samples.columns["timestamp"][starts_of_runs(session_S)], len(session_S))

    def add_times(self, start_of_session: Int64s, num_samples: int) -> None:
        self.num_samples += num_samples
        self._blocks.append(start_of_session)

    @property
    def num_sessions(self) -> int:
        return sum(map(len, self._blocks))

    def find_splits(self, splits: Mapping[str, Any], where: str) -> dict[str, int]:
        """Where each split begins, in ms; InputError if one of them, or what is left to train on, is empty."""
        if not splits:
            return {}
        times = np.sort(np.concatenate(self._blocks)) if self._blocks else np.empty(0, np.int64)
        begins: list[int] = []
        for value in splits.values():
            if isinstance(value, str):
                begins.append(parse_time(value))
                continue
            left = sum(list(splits.values())[len(begins) :])
            place = len(times) - round(left * len(times))
            begins.append(int(times[min(place, len(times) - 1)]))
        edges = [0, *np.searchsorted(times, begins).tolist(), len(times)]
        for name, low, high in zip(("train", *splits), edges, edges[1:], strict=False):
            if high <= low:
                what = "no session is left to train on" if name == "train" else f"split {name!r} holds no session"
                raise InputError(f"{where}: splits is {dict(splits)}: {what}; the log has {len(times):,} sessions")
        return dict(zip(splits, begins, strict=True))
