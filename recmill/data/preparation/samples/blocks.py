"""Makes the samples of a block of events: whole users, sorted by user and time.

N = events, S = samples, P = positives. A history stays a window into its user's events until it is written: windows of
50 ids take 12 bytes per sample instead of 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels.take_rows import take_windows
from recmill.data.dense_values import DenseValues
from recmill.data.preparation.samples.attributes import Column, KeyTable, ListTable
from recmill.data.preparation.samples.negatives import Drawing, Positives, keep_negatives, mixed
from recmill.data.preparation.samples.timelines import Bools, Int64s, Ints, Timelines, number_repeats, settle_ties
from recmill.data.schema import Schema
from recmill.data.sources.lists import id_column, offsets_of, plain_column, space_out, starts_of_runs

HOUR_MS = 3_600_000
THURSDAY = 3  # 1970-01-01, counted from Monday


@dataclass(frozen=True, kw_only=True)
class ValuePlan:
    """Where a value comes from: a column of the events, or of a table looked up by the code in the column `key`."""

    column: str
    table: str = ""
    key: str = ""
    is_of_item: bool = False  # a column of the events that a drawn negative takes from the table of item columns


@dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """A feature, with its column resolved and its statistics known."""

    name: str
    kind: str
    value: ValuePlan | None = None
    time: str = ""
    window: str = ""  # name of the history's window
    lists: ListTable | None = None  # of a column with several values per row: its values are numbers of lists
    dense: DenseValues = field(default_factory=DenseValues)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Which earlier events a history lists: those with a true value in `column` ("" means all), at most `last`."""

    column: str
    last: int


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """All that the samples of a block depend on besides its events."""

    schema: Schema
    gap_ms: int  # 0: sessions are given
    has_request: bool
    has_filter: bool  # not all events are samples
    negatives: str
    per_positive: int
    seed: int
    num_items: int
    features: tuple[FeaturePlan, ...]
    windows: Mapping[str, WindowPlan]
    tables: Mapping[str, KeyTable]
    drawing: Drawing | None = None


ITEM_COLUMNS = "item columns"  # name of the table of the events' columns that describe the item


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples in the order of their sessions; `starts` and `lengths` are windows into `histories`."""

    columns: Mapping[str, Column]  # session_id, timestamp, labels, and features without histories
    starts: Mapping[str, Int64s]  # by window
    lengths: Mapping[str, Ints]
    histories: Mapping[str, Int64s]  # by feature: all values that windows may cover


def make_samples(events: Mapping[str, Column], plan: SamplePlan) -> Samples:
    """The samples of whole users' events, which are sorted by user and time."""
    return _Block(events, plan).samples()


def list_columns(
    samples: Mapping[str, Column],
    windows: Mapping[str, tuple[Int64s, Ints]],
    histories: Mapping[str, Any],
    plan: SamplePlan,
) -> pa.RecordBatch:
    """The samples as rows of the raw log: histories copied out of their windows."""
    arrays: list[pa.Array] = [plain_column(samples["session_id"]), plain_column(samples["timestamp"])]
    arrays += [plain_column(samples[label]) for label in plan.schema.labels]
    for feature in plan.features:
        if feature.window:
            starts, lengths = windows[feature.window]
            arrays.append(_lists(histories[feature.name], starts, lengths))
        elif feature.lists:
            numbers = samples[feature.name]
            arrays.append(_lists(feature.lists.values, feature.lists.starts[numbers], feature.lists.lengths[numbers]))
        else:
            column = samples[feature.name]
            arrays.append(plain_column(column) if feature.kind == "dense" else id_column(column))
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema.arrow_schema())


def _lists(values: Any, starts: Int64s, lengths: Ints) -> pa.Array:
    offsets = offsets_of(lengths)
    taken = take_windows(values, starts, lengths.astype(np.int64), num_values=int(offsets[-1]), num_threads=1)
    return pa.ListArray.from_arrays(plain_column(offsets.astype(np.int32)), plain_column(taken))


class _Block:
    event_S: Int64s  # of each sample
    item_S: Ints  # its own item, or the one drawn
    is_drawn_S: Bools
    time_S: Int64s

    def __init__(self, events: Mapping[str, Column], plan: SamplePlan) -> None:
        rest = [column for name, column in sorted(events.items()) if name not in ("user", "time", "item")]
        order = settle_ties(events["user"], events["time"], [events["item"], *rest])
        self.events = events if order is None else {name: column[order] for name, column in events.items()}
        self.plan = plan
        self.user_N, self.time_N, self.item_N = self.events["user"], self.events["time"], self.events["item"]
        self._rows: dict[tuple[str, str], Int64s] = {}

    @cached_property
    def timelines(self) -> Timelines:
        return Timelines.of(
            self.user_N,
            self.time_N,
            request_N=self.events["request"] if self.plan.has_request else None,
            session_N=None if self.plan.gap_ms else self.events["session"],
            gap_ms=self.plan.gap_ms,
        )

    def samples(self) -> Samples:
        self._choose()
        session_S = self.timelines.session_N[self.event_S]
        if not self.plan.gap_ms:  # given sessions may interleave
            order = np.argsort(session_S, kind="stable")
            self.event_S, self.item_S, self.is_drawn_S = self.event_S[order], self.item_S[order], self.is_drawn_S[order]
            session_S = session_S[order]
        self.time_S = self.time_N[self.event_S]
        columns: dict[str, Column] = {
            "session_id": session_S,
            "timestamp": space_out(self.time_S, starts_of_runs(session_S), spacing=1),
        }
        for number, name in enumerate(self.plan.schema.labels):
            label_S = self.events[f"label_{number}"][self.event_S].astype(np.float32)
            columns[name] = np.where(self.is_drawn_S, np.float32(0), label_S)
        starts, lengths, kept = self._windows()
        histories: dict[str, Int64s] = {}
        for feature in self.plan.features:
            if feature.window:
                assert feature.value is not None
                values = self._of_events(feature.value).astype(np.int64)
                listed = kept[feature.window]
                histories[feature.name] = values if listed is None else values[listed]
            elif feature.kind == "dense":
                columns[feature.name] = feature.dense.apply(self._value(feature))
            else:
                columns[feature.name] = self._value(feature).astype(np.int64)
        return Samples(columns=columns, starts=starts, lengths=lengths, histories=histories)

    def _choose(self) -> None:
        """Which events are samples, and which items are drawn as negatives after them."""
        plan, events = self.plan, self.events
        is_sample_N = events["is_sample"] if plan.has_filter else np.ones(len(self.user_N), dtype=np.bool_)
        is_positive_N = is_sample_N & (events["label_0"] > 0)
        self.event_S = np.flatnonzero(is_sample_N)
        if plan.negatives != "none":
            positive_P = np.flatnonzero(is_positive_N)
            positives = Positives.of(self.user_N[positive_P], self.item_N[positive_P], num_items=plan.num_items)
            if plan.drawing is not None:
                self._draw(plan.drawing, positive_P, positives)
                return
            is_free_N = ~is_positive_N & is_sample_N & ~positives.contain(self.user_N, self.item_N)
            group_N = self.timelines.session_N if plan.negatives == "in_session" else self.timelines.request_N
            rows = np.arange(len(self.user_N))
            kept_N = keep_negatives(is_free_N, is_positive_N, group_N, self._keys(rows), per_positive=plan.per_positive)
            self.event_S = np.flatnonzero(is_positive_N | kept_N)
        self.item_S = self.item_N[self.event_S]
        self.is_drawn_S = np.zeros(len(self.event_S), dtype=np.bool_)

    def _draw(self, drawing: Drawing, positive_P: Int64s, positives: Positives) -> None:
        number = self.plan.per_positive
        drawn_PK = drawing.draw(
            self._keys(positive_P), self.user_N[positive_P], positives, per_positive=number, seed=self.plan.seed
        )
        event_S = np.repeat(positive_P, number + 1)
        item_S = np.concatenate([self.item_N[positive_P][:, None].astype(np.int64), drawn_PK], axis=1).reshape(-1)
        is_drawn_S = np.tile(np.arange(number + 1) > 0, len(positive_P))
        found = item_S >= 0
        if not found.all():
            event_S, item_S, is_drawn_S = event_S[found], item_S[found], is_drawn_S[found]
        self.event_S, self.item_S, self.is_drawn_S = event_S, item_S, is_drawn_S

    def _keys(self, rows: Int64s) -> npt.NDArray[np.uint64]:
        """A hash per event that does not depend on its place in the block."""
        user, time, item = self.user_N[rows], self.time_N[rows], self.item_N[rows]
        is_repeat = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
        number = number_repeats([item, time, user]) if is_repeat.any() else 0
        return mixed(self.plan.seed, user, time, item, number)

    def _windows(self) -> tuple[dict[str, Int64s], dict[str, Ints], dict[str, Bools | None]]:
        starts: dict[str, Int64s] = {}
        lengths: dict[str, Ints] = {}
        kept: dict[str, Bools | None] = {}
        before_S, first_S = self.timelines.before_N[self.event_S], self.timelines.first_N[self.event_S]
        for name, window in self.plan.windows.items():
            listed_N = kept[name] = self.events[window.column] if window.column else None
            if listed_N is None:
                end_S, low_S = before_S, first_S
            else:
                count = offsets_of(listed_N)
                end_S, low_S = count[before_S], count[first_S]
            starts[name] = np.maximum(end_S - window.last, low_S)
            lengths[name] = (end_S - starts[name]).astype(np.int32)
        return starts, lengths, kept

    def _of_events(self, value: ValuePlan) -> Column:
        """A value for every event."""
        if not value.table:
            return self.events[value.column]
        table = self.plan.tables[value.table]
        return table.look_up(value.column, table.rows_at(self.events[value.key], self.time_N))

    def _value(self, feature: FeaturePlan) -> Column:
        """A value for every sample."""
        value = feature.value
        if value is None:
            return self._time_value(feature.time)
        if value.table:
            table = self.plan.tables[value.table]
            return table.look_up(value.column, self._rows_of(value.table, value.key))
        own_S: Column = self.events[value.column][self.event_S]
        if not value.is_of_item or not self.is_drawn_S.any():
            return own_S
        newest = self.plan.tables[ITEM_COLUMNS].look_up(value.column, self._rows_of(ITEM_COLUMNS, "item"))
        return np.where(self.is_drawn_S, newest, own_S)

    def _rows_of(self, table: str, key: str) -> Int64s:
        if (table, key) not in self._rows:
            code_S = self.item_S if key == "item" else self.events[key][self.event_S]
            self._rows[table, key] = self.plan.tables[table].rows_at(code_S, self.time_S)
        return self._rows[table, key]

    def _time_value(self, time: str) -> Column:
        if time == "hours_since_last_event":
            before_S = self.timelines.before_N[self.event_S]
            is_first = before_S == self.timelines.first_N[self.event_S]
            idle_S = (self.time_S - self.time_N[np.maximum(before_S - 1, 0)]) / HOUR_MS
            return np.where(is_first, np.nan, idle_S)
        hours_S: Column = self.time_S // HOUR_MS
        by_hour = {"hour_of_day": hours_S % 24, "hour_of_week": (hours_S + 24 * THURSDAY) % 168}
        found: Column = by_hour[time] if time in by_hour else (hours_S // 24 + THURSDAY) % 7
        return found
