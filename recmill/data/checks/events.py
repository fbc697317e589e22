"""Checks of the events, in Ibis on the engine that prepares them: nulls, joins, duplicates, existence, days."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from recmill.data.checks.days import check_days, refuse_empty_days
from recmill.data.checks.findings import MAX_EXAMPLES, LogFinding, LogFindings
from recmill.data.inspection.naming import BEGINNING, words
from recmill.data.preparation.queries.events import EventTable
from recmill.data.preparation.queries.tables import SourceTables, without_nan
from recmill.data.preparation.spec import TimeSpec

MANY_NULLS = 0.5  # share of the events, from which nulls are a warning
MANY_UNJOINED = 0.05
CHECKS = ("nulls", "joins", "duplicates", "existence", "days")
DAY_MS = 86_400_000


def check_events(tables: SourceTables, events: EventTable) -> LogFindings:
    """What deserves a look in the events; InputError for empty days, unless log.yaml allows them."""
    labels = {f"label_{n}": label.name for n, label in enumerate(tables.spec.labels) if not label.every}
    by_day = _count_days(tables, events, list(labels))
    if tables.spec.checks.empty_days == "refuse":
        path = tables.files[tables.spec.events.source].path
        refuse_empty_days(by_day, log_yaml=tables.log_yaml, path=path)
    found = [*_nulls(tables, events), *_side_nulls(tables, events), *_joins(tables, events)]
    found += [*_duplicates(tables, events), *_existence(tables, events)]
    about_days, days = check_days(by_day, labels)
    return LogFindings(checks=CHECKS, found=(*found, *about_days), days=days)


def _fetch(tables: SourceTables, query: Any) -> dict[str, int]:
    """The one row of a query of counts; a sum over nothing is 0."""
    return {name: int(value or 0) for name, value in tables.engine.fetch(query).to_pylist()[0].items()}


def _examples(tables: SourceTables, query: Any, names: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """Some rows, the same on every engine, with columns named as in the source and times as people write them."""
    rows = tables.engine.fetch(query.order_by(query.columns).limit(MAX_EXAMPLES))
    return tuple(
        {
            names.get(name, name): shown_time(value) if name in ("time", "since") else value
            for name, value in row.items()
        }
        for row in rows.to_pylist()
    )


def shown_time(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "null"
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _names(tables: SourceTables, events: EventTable) -> dict[str, str]:
    """Columns of the event table by the names that users know."""
    spec = tables.spec.events
    own = {"user": spec.user, "item": spec.item, "time": spec.time.column}
    return own | {name: column for column, name in events.raw.items()}


def _nulls(tables: SourceTables, events: EventTable) -> Iterator[LogFinding]:
    """Columns of the events that features read, with nulls."""
    read = [feature.column for feature in tables.spec.features if feature.column in events.raw]
    if not read:
        return
    rows, names = events.rows, _names(tables, events)
    counts = {
        events.raw[column]: without_nan(rows[events.raw[column]]).isnull().sum() for column in dict.fromkeys(read)
    }
    for raw, count in _fetch(tables, rows.aggregate(**counts)).items():
        if count:
            share = count / events.num_events
            known = without_nan(rows[raw])
            without = rows.filter(known.isnull()).select("user", "item", "time", **{raw: known})
            yield LogFinding(
                check="nulls",
                level="warning" if share > MANY_NULLS else "info",
                subject=names[raw],
                message=f"{names[raw]!r} is null in {count:,} of {events.num_events:,} events ({share:.1%})",
                numbers={"num_nulls": count, "num_events": events.num_events},
                examples=_examples(tables, without, names),
            )


def _event_key(tables: SourceTables, events: EventTable, column: str) -> Any:
    """The column of the event table that holds the key of a join."""
    spec = tables.spec.events
    own = {spec.user: "user", spec.item: "item"}
    return events.rows[own.get(column) or events.raw[column]]


def _keys(tables: SourceTables, events: EventTable, number: int) -> tuple[Any, Any]:
    """Keys of the events and of the side table, as columns of the same type."""
    join = tables.spec.joins[number]
    side = tables.side(join)
    ours = _event_key(tables, events, join.column)
    theirs = tables.id_of(side, tables.spec.sources[join.source].key, f"sources.{join.source}.key")
    if ours.type() != theirs.type():
        ours, theirs = ours.cast("string"), theirs.cast("string")
    return ours, theirs


def _side_nulls(tables: SourceTables, events: EventTable) -> Iterator[LogFinding]:
    """Columns of side tables that features read, with nulls in the rows that events find.

    Of tables that change with time, which row an event finds is not decided yet: they are left out.
    """
    for number, join in enumerate(tables.spec.joins):
        places = {feature.column: feature.name for feature in tables.spec.features if feature.column}
        origins = [tables.resolve(column, place) for column, place in places.items()]
        read = list(dict.fromkeys(origin.column for origin in origins if origin.join == number))
        if not read or tables.spec.sources[join.source].valid_from:
            continue
        ours, theirs = _keys(tables, events, number)
        used = events.rows.select(key=ours).group_by("key").aggregate(num_events=lambda t: t.count())
        side = tables.side(join)
        side = side.select(
            key=theirs, **{f"no {n}": without_nan(side[column]).isnull() for n, column in enumerate(read)}
        )
        found = used.inner_join(side, "key")
        counts = {f"{n}": found.num_events.sum(where=found[f"no {n}"]) for n in range(len(read))}
        for n, count in _fetch(tables, found.aggregate(**counts)).items():
            if not count:
                continue
            share, name = count / events.num_events, f"{join.name or join.source}.{read[int(n)]}"
            without = found.filter(found[f"no {n}"]).order_by([found.num_events.desc(), found.key])
            rows = tables.engine.fetch(without.select("key", "num_events").limit(MAX_EXAMPLES))
            yield LogFinding(
                check="nulls",
                level="warning" if share > MANY_NULLS else "info",
                subject=name,
                message=f"{name!r} is null for {count:,} of {events.num_events:,} events ({share:.1%})",
                numbers={"num_nulls": count, "num_events": events.num_events},
                examples=tuple({join.column: row["key"], "events": row["num_events"]} for row in rows.to_pylist()),
            )


def _joins(tables: SourceTables, events: EventTable) -> Iterator[LogFinding]:
    """Events that find no row in a side table."""
    for number, join in enumerate(tables.spec.joins):
        ours, theirs = _keys(tables, events, number)
        used = events.rows.select(key=ours).group_by("key").aggregate(num_events=lambda t: t.count())
        known = tables.side(join).select(key=theirs).distinct()
        lost = used.anti_join(known, "key")
        count = _fetch(tables, lost.aggregate(n=lost.num_events.sum()))["n"]
        if not count:
            continue
        share, key = count / events.num_events, f"{join.source}.{tables.spec.sources[join.source].key}"
        rows = tables.engine.fetch(lost.order_by([lost.num_events.desc(), lost.key]).limit(MAX_EXAMPLES))
        yield LogFinding(
            check="joins",
            level="warning" if share > MANY_UNJOINED else "info",
            subject=join.source,
            message=f"{count:,} of {events.num_events:,} events ({share:.1%}) find no row in {key}",
            numbers={"num_unjoined": count, "num_events": events.num_events},
            examples=tuple({join.column: row["key"], "events": row["num_events"]} for row in rows.to_pylist()),
        )


def _duplicates(tables: SourceTables, events: EventTable) -> Iterator[LogFinding]:
    """Events of one user with the same item, time and labels."""
    rows = events.rows
    same = ["user", "item", "time", *(f"label_{n}" for n in range(len(tables.spec.labels)))]
    repeated = rows.group_by(same).aggregate(times=rows.count())
    repeated = repeated.filter(repeated.times > 1)
    found = _fetch(tables, repeated.aggregate(num=repeated.count(), extra=(repeated.times - 1).sum()))
    if not found["num"]:
        return
    extra = found["extra"]
    yield LogFinding(
        check="duplicates",
        level="warning",
        subject=tables.spec.events.source,
        message=f"{extra:,} of {events.num_events:,} events ({extra / events.num_events:.2%}) repeat another one: "
        "same user, item, time and label",
        numbers={"num_duplicates": extra, "num_events": events.num_events},
        examples=_examples(tables, repeated.select("user", "item", "time", "times"), _names(tables, events)),
    )


def _existence(tables: SourceTables, events: EventTable) -> Iterator[LogFinding]:
    """Events before the user or item existed: before its first row, or before the time that the side table names."""
    for number, join in enumerate(tables.spec.joins):
        side = tables.side(join)
        ours, theirs = _keys(tables, events, number)
        for time in _beginnings(tables, join.source):
            since = tables.time_of(side, time, f"sources.{join.source}")
            first = side.select(key=theirs, since=since).group_by("key").aggregate(since=lambda t: t.since.min())
            early = events.rows.mutate(key=ours).inner_join(first, "key").filter(lambda t: t.time < t.since)
            early = early.select("user", "item", "time", "since")
            count = _fetch(tables, early.aggregate(n=early.count()))["n"]
            if not count:
                continue
            share = count / events.num_events
            yield LogFinding(
                check="existence",
                level="warning",
                subject=f"{join.source}.{time.column}",
                message=f"{count:,} of {events.num_events:,} events ({share:.1%}) happened before {time.column!r} of "
                f"their row in {join.source}",
                numbers={"num_early": count, "num_events": events.num_events},
                examples=_examples(tables, early, _names(tables, events) | {"since": time.column}),
            )


def _beginnings(tables: SourceTables, source: str) -> list[TimeSpec]:
    """When a row of a side table begins: valid_from, and times whose name says so (signed_up, created_at)."""
    spec = tables.spec.sources[source]
    found = [spec.valid_from] if spec.valid_from else []
    for name, kind in tables.tables[source].schema().items():
        is_time = kind.is_timestamp() or kind.is_date()
        if is_time and words(name) & BEGINNING and name not in {time.column for time in found}:
            found.append(TimeSpec(column=name))
    return found


def _count_days(tables: SourceTables, events: EventTable, labels: list[str]) -> pa.Table:
    """One row per day since 1970 with events: `day`, `num_events`, and the sum of each label."""
    rows = events.rows
    by_day = rows.mutate(day=(rows.time // DAY_MS).cast("int64"))
    sums = {label: by_day[label].sum() for label in labels}
    counted = by_day.group_by("day").aggregate(num_events=by_day.count(), **sums)
    return tables.engine.fetch(counted.order_by("day"))
