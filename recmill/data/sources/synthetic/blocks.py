"""Blocks of synthetic samples, in which every repeated list is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill.data.sources.lists import IntArray, Jagged, id_column, offsets_of, plain_column, window_column


@dataclass(frozen=True, kw_only=True)
class SampleBlock:
    """Samples, and the distinct user states they point to.

    samples["timestamp"]   = [t0, t1, t2]           one value per sample: keys, item ids, item dense values
    versions["interests"]  = [ 0,  0,  1]           the state of a user group that a sample sees
    lists["interests.0"]   = [[7, 9], [4]]          one list per state
    dense["interests.age"] = [.3, .5]               one value per state
    shifts["history"]      = [ 0,  1,  1]           a history is a window into its session's stream
    """

    samples: dict[str, npt.NDArray[Any]]
    versions: dict[str, IntArray]
    shifts: dict[str, IntArray]
    lists: dict[str, Jagged]
    dense: dict[str, npt.NDArray[np.float32]]
    owners: dict[str, str]  # list or dense feature -> the key in `versions`
    history_lengths: dict[str, int]

    @property
    def num_samples(self) -> int:
        return len(self.samples["timestamp"])

    @classmethod
    def concat(cls, blocks: Sequence[Self]) -> Self:
        first = blocks[0]
        if len(blocks) == 1:
            return first
        representatives = {owner: feature for feature, owner in first.owners.items()}
        versions: dict[str, IntArray] = {}
        for owner, feature in representatives.items():
            bases = offsets_of(np.array([block.num_states(feature) for block in blocks]))
            parts = [block.versions[owner] + base for block, base in zip(blocks, bases[:-1], strict=True)]
            versions[owner] = np.concatenate(parts)
        return cls(
            samples={name: np.concatenate([b.samples[name] for b in blocks]) for name in first.samples},
            versions=versions,
            shifts={name: np.concatenate([b.shifts[name] for b in blocks]) for name in first.shifts},
            lists={name: Jagged.concat([b.lists[name] for b in blocks]) for name in first.lists},
            dense={name: np.concatenate([b.dense[name] for b in blocks]) for name in first.dense},
            owners=first.owners,
            history_lengths=first.history_lengths,
        )

    def num_states(self, feature: str) -> int:
        return len(self.lists[feature].offsets) - 1 if feature in self.lists else len(self.dense[feature])

    def select(self, rows: IntArray) -> Self:
        """These samples, and only the states that they see."""
        versions: dict[str, IntArray] = {}
        kept: dict[str, IntArray] = {}
        for owner, column in self.versions.items():
            seen = np.zeros(int(column.max(initial=-1)) + 1, dtype=np.bool_)
            seen[column[rows]] = True
            kept[owner] = np.flatnonzero(seen)
            versions[owner] = (np.cumsum(seen) - 1)[column[rows]]
        return type(self)(
            samples={name: column[rows] for name, column in self.samples.items()},
            versions=versions,
            shifts={name: column[rows] for name, column in self.shifts.items()},
            lists={name: lists.select(kept[self.owners[name]]) for name, lists in self.lists.items()},
            dense={name: column[kept[self.owners[name]]] for name, column in self.dense.items()},
            owners=self.owners,
            history_lengths=self.history_lengths,
        )

    def windows(self, feature: str, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Start and length, in the feature's values, of the list that each of these samples sees."""
        lists = self.lists[feature]
        state = self.versions[self.owners[feature]][rows]
        if feature in self.history_lengths:
            starts = lists.offsets[state] + self.shifts[feature][rows]
            return starts, np.full(len(rows), self.history_lengths[feature])
        return lists.offsets[state], lists.lengths[state]

    def to_arrow(self, rows: IntArray, schema: pa.Schema) -> pa.RecordBatch:
        """These samples as rows of the log, every list written out."""
        columns = []
        for field in schema:
            if field.name in self.lists:
                starts, lengths = self.windows(field.name, rows)
                columns.append(window_column(self.lists[field.name].values, starts, lengths))
            elif field.name in self.dense:
                columns.append(plain_column(self.dense[field.name][self.versions[self.owners[field.name]][rows]]))
            elif pa.types.is_list(field.type):
                columns.append(id_column(self.samples[field.name][rows]))
            else:
                columns.append(plain_column(self.samples[field.name][rows]))
        return pa.RecordBatch.from_arrays(columns, schema=schema)
