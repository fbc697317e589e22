"""The events with everything that is decided per event: ids, time, labels, outcomes, filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ibis

from recmill.artifacts import InputError
from recmill.data.inspection.text_files import find_line
from recmill.data.preparation.queries.tables import ColumnOrigin, SourceTables, as_text
from recmill.data.preparation.spec import OutcomeSpec, Where


@dataclass(frozen=True, kw_only=True)
class EventTable:
    """One row per event, with columns `user`, `item`, `time`, `label_0`, ... and what the spec needs beyond."""

    rows: Any
    raw: Mapping[str, str]  # column of the source -> its name in `rows`
    filters: Mapping[Where, str]  # conditions of histories -> their column
    num_events: int
    first_ms: int
    last_ms: int


def make_events(tables: SourceTables) -> EventTable:
    """The events that log.yaml reads, checked: ids and times are never null."""
    spec, events = tables.spec, tables.spec.events
    places = {events.user: "events.user", events.item: "events.item", events.time.column: "events.time.column"}
    if events.session.column:
        places[events.session.column] = "events.session.column"
    if events.request:
        places[events.request] = "events.request"
    places |= {column: f"events.item_columns[{n}]" for n, column in enumerate(events.item_columns)}
    places |= {join.column: f"joins[{n}].column" for n, join in enumerate(spec.joins)}
    tables.check(events.source, places)
    source = _with_joined(tables, tables.events)
    if events.where:
        source = source.filter(tables.meets(source, events.where, "events.where"))
    raw = {column: f"raw_{n}" for n, column in enumerate(_raw_columns(tables))}
    columns: dict[str, Any] = {
        "user": tables.id_of(source, events.user, "events.user"),
        "item": tables.id_of(source, events.item, "events.item"),
        "time": tables.time_of(source, events.time, "events.time"),
        **{name: as_text(source[column]) for column, name in raw.items()},
    }
    for name, column in (("session", events.session.column), ("request", events.request)):
        if column:
            columns[name] = tables.id_of(source, column, f"events.{name}")
    if spec.samples.where:
        columns["is_sample"] = tables.meets(source, spec.samples.where, "samples.where")
    for number, label in enumerate(spec.labels):
        if not label.outcome:
            met = tables.meets(source, label.where, f"labels[{number}].where")
            columns[f"label_{number}"] = met.cast("int8")
    filters: dict[Where, str] = {}
    for number, feature in enumerate(spec.features):
        if feature.history and feature.history.where and feature.history.where not in filters:
            name = filters[feature.history.where] = f"listed_{len(filters)}"
            columns[name] = tables.meets(source, feature.history.where, f"features[{number}].history.where")
    for number, outcome in enumerate(spec.outcomes):
        for column in outcome.match:
            tables.check(events.source, {column: f"outcomes[{number}].match"})
            columns[f"match_{number}_{column}"] = tables.id_of(source, column, f"outcomes[{number}].match")
    rows = source.select(**columns)
    found = _check_values(tables, source, rows)
    for number, outcome in enumerate(spec.outcomes):
        rows = _with_outcome(tables, rows, number, outcome)
    if spec.outcomes:
        rows = tables.engine.keep(rows)
    return EventTable(rows=rows, raw=raw, filters=filters, **found)


def _conditions(tables: SourceTables) -> list[tuple[str, Where]]:
    spec = tables.spec
    found = [("events.where", spec.events.where), ("samples.where", spec.samples.where)]
    found += [(f"labels[{n}].where", label.where) for n, label in enumerate(spec.labels)]
    return found + [
        (f"features[{n}].history.where", feature.history.where)
        for n, feature in enumerate(spec.features)
        if feature.history
    ]


def _with_joined(tables: SourceTables, source: Any) -> Any:
    """The events with the columns of joins that conditions test, named as in log.yaml."""
    wanted: dict[int, dict[str, str]] = {}
    for place, where in _conditions(tables):
        for number, condition in enumerate(where):
            origin = tables.resolve(condition.column, f"{place}[{number}].column")
            if origin.join is not None:
                wanted.setdefault(origin.join, {})[condition.column] = origin.column
    for number, columns in wanted.items():
        join = tables.spec.joins[number]
        key = tables.spec.sources[join.source].key
        if tables.spec.sources[join.source].valid_from:
            raise tables.error(
                f"joins[{number}]: conditions cannot test {next(iter(columns))!r}, which changes with time"
            )
        side = tables.side(join)
        side = side.select(
            **{f"key of {number}": side[key]}, **{name: side[column] for name, column in columns.items()}
        )
        source = source.left_join(side, source[join.column] == side[f"key of {number}"]).drop(f"key of {number}")
    return source


def _raw_columns(tables: SourceTables) -> list[str]:
    """Columns of the events that features and joins read, besides user and item."""
    spec = tables.spec
    names = [join.column for join in spec.joins]
    for number, feature in enumerate(spec.features):
        name = feature.column or (feature.history.of if feature.history else "")
        if name:
            origin = tables.resolve(name, f"features[{number}].{'column' if feature.column else 'history.of'}")
            if origin.join is None:
                names.append(name)
    names += spec.events.item_columns
    return [name for name in dict.fromkeys(names) if name not in (spec.events.user, spec.events.item)]


def is_key(tables: SourceTables, origin: ColumnOrigin) -> str:
    """ "user" or "item" if a column of the events holds that id, else ""."""
    events = tables.spec.events
    return "" if origin.join is not None else {events.user: "user", events.item: "item"}.get(origin.column, "")


def _check_values(tables: SourceTables, source: Any, rows: Any) -> dict[str, int]:
    spec, path = tables.spec.events, tables.files[tables.spec.events.source].path
    facts = {"num_events": rows.count(), "first_ms": rows.time.min(), "last_ms": rows.time.max()}
    named = {"user": spec.user, "item": spec.item, "time": spec.time.column, "session": spec.session.column}
    named = {name: column for name, column in (named | {"request": spec.request}).items() if column}
    facts |= {f"nulls of {name}": rows[name].isnull().sum() for name in named}
    floats = [name for name, column in named.items() if name != "time" and source[column].type().is_floating()]
    parts = {f"parts of {name}": (source[named[name]] != source[named[name]].floor()).sum() for name in floats}
    try:
        found = tables.engine.fetch(source.aggregate(**parts)).to_pylist()[0] if parts else {}
        found |= tables.engine.fetch(rows.aggregate(**facts)).to_pylist()[0]
    except InputError as error:
        raise tables.error(f"events: {path}: {error}{_place_of(tables, str(error))}") from None
    numbers = {name: value or 0 for name, value in found.items()}
    total = numbers["num_events"]
    if total == 0:
        filtered = " that meet events.where" if spec.where else ""
        raise tables.error(f"events.source: {path} holds no events{filtered}")
    for name, column in named.items():
        if missing := numbers.get(f"nulls of {name}", 0):
            raise tables.error(
                f"events.{name}: column {column!r} of {path} is null in {missing:,} of {total:,} events; drop them "
                f"with events.where: [{{column: {column}, is_null: false}}]"
            )
        if broken := numbers.get(f"parts of {name}", 0):
            raise tables.error(
                f"events.{name}: column {column!r} of {path} is not a whole number in {broken:,} of {total:,} events"
            )
    return {name: int(numbers[name]) for name in ("num_events", "first_ms", "last_ms")}


def _place_of(tables: SourceTables, reason: str) -> str:
    """Where the value that an engine names in quotes stands in a text file."""
    source, named = tables.files[tables.spec.events.source], re.search(r"\"([^\"]+)\"|'([^']+)'", reason)
    where = find_line(source, named[1] or named[2]) if named and source.is_text else ""
    return f"; see {where}" if where else ""


def _with_outcome(tables: SourceTables, rows: Any, number: int, outcome: OutcomeSpec) -> Any:
    """The rows with the labels of an outcome: 1 if the next one with equal keys is at most `within` later.

    Events and outcomes are merged by time, and each event looks ahead to the next outcome.
    """
    place, source = f"outcomes[{number}]", tables.tables[outcome.source]
    wanted = dict.fromkeys(outcome.match.values(), f"{place}.match")
    wanted |= {outcome.time.column: f"{place}.time.column"}
    wanted |= {condition.column: f"{place}.where[{n}].column" for n, condition in enumerate(outcome.where)}
    tables.check(outcome.source, wanted)
    if outcome.where:
        source = source.filter(tables.meets(source, outcome.where, f"{place}.where"))
    keys = {column: f"match_{number}_{column}" for column in outcome.match}
    ids = {keys[own]: tables.id_of(source, other, f"{place}.match") for own, other in outcome.match.items()}
    for own, name in keys.items():
        kinds = (rows[name].type(), ids[name].type())
        if kinds[0] != kinds[1]:
            other = outcome.match[own]
            raise tables.error(
                f"{place}.match: {own!r} of the events is {kinds[0]}, {other!r} of the outcome {kinds[1]}"
            )
    later = source.select(time=tables.time_of(source, outcome.time, f"{place}.time"), **ids)
    later = later.filter([later[name].notnull() for name in later.columns])  # else nulls would match nulls
    empty = {name: ibis.null(kind) for name, kind in rows.schema().items() if name not in later.columns}
    merged = ibis.union(
        rows.mutate(outcome_time=ibis.null("int64")),
        later.mutate(**empty, outcome_time=later.time).select(*rows.columns, "outcome_time"),
    )
    ahead = ibis.window(
        group_by=list(keys.values()), order_by=[merged.time, merged.outcome_time.notnull()], preceding=0, following=None
    )
    merged = merged.mutate(next_time=merged.outcome_time.min().over(ahead))
    merged = merged.filter(merged.outcome_time.isnull())
    is_met = (merged.next_time - merged.time <= outcome.within_ms).fill_null(False).cast("int8")
    labels = {f"label_{n}": is_met for n, label in enumerate(tables.spec.labels) if label.outcome == outcome.name}
    return merged.mutate(**labels).drop("outcome_time", "next_time", *keys.values())
