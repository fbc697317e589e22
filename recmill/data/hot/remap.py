"""Which ids are hot, and their slots among the hot rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recmill.artifacts import InputError, ShardPlan, join_path
from recmill.artifacts.places.columns import read_numbers

IdArray = npt.NDArray[np.int64]

# The slots of a table are an array over its rows if that takes at most this much; otherwise hot rows are searched.
MAX_ARRAY_BYTES = 1 << 28
COLD = -1


class HotRemap:
    """The slots of ids per table; ids that are not hot, including unknown ones, have slot -1."""

    def __init__(self, hot_rows: Mapping[str, IdArray], num_rows: Mapping[str, int]) -> None:
        self.hot_rows = {name: np.asarray(rows, np.int64) for name, rows in hot_rows.items()}
        self.num_rows = dict(num_rows)
        self._slots: dict[str, npt.NDArray[np.int32]] = {}
        self._sorted: dict[str, tuple[IdArray, npt.NDArray[np.int32]]] = {}
        for name, rows in self.hot_rows.items():
            slots = np.arange(len(rows), dtype=np.int32)
            if len(rows) and rows.max() >= self.num_rows[name]:
                raise InputError(
                    f"table {name!r} has {self.num_rows[name]} rows, the plan's hot rows go to {rows.max()}"
                )
            if 4 * self.num_rows[name] <= MAX_ARRAY_BYTES:
                self._slots[name] = np.full(self.num_rows[name], COLD, np.int32)
                self._slots[name][rows] = slots
            else:
                order = np.argsort(rows)
                self._sorted[name] = rows[order], slots[order]

    def slots(self, table: str, ids: IdArray) -> npt.NDArray[np.int32]:
        """The slot of each id, -1 where it is cold."""
        if table in self._slots:
            known = self._slots[table]
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(known)):
                inside = (ids >= 0) & (ids < len(known))
                return np.where(inside, known[np.where(inside, ids, 0)], COLD).astype(np.int32)
            return np.take(known, ids)
        rows, slots = self._sorted[table]
        if not len(rows):
            return np.full(len(ids), COLD, np.int32)
        place = np.minimum(np.searchsorted(rows, ids), len(rows) - 1)
        return np.where(rows[place] == ids, slots[place], COLD).astype(np.int32)


def load_hot_rows(plan: ShardPlan | str | Path) -> dict[str, IdArray]:
    """The hot rows of every table of a plan, in the order of their slots."""
    plan = plan if isinstance(plan, ShardPlan) else ShardPlan.load(plan)
    hot_set = plan.hot_set
    if not hot_set:
        raise InputError(f"{plan.path}: the plan has no hot set; plan again with --hot-budget")
    found: dict[str, IdArray] = {}
    for name in hot_set.tables:
        path = join_path(plan.path, f"hot/{name}.parquet")
        rows, slots = read_numbers(path, ("row", "slot"))
        if len(np.unique(rows)) != len(rows):
            raise InputError(f"{path}: lists a row twice")
        if not (slots < len(slots)).all() or not (np.bincount(slots, minlength=len(slots)) == 1).all():
            raise InputError(f"{path}: slots must be 0 to {len(slots) - 1}, each once")
        found[name] = np.empty(len(rows), np.int64)
        found[name][slots] = rows
    return found
