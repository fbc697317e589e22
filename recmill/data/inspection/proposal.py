"""Looks at tables and proposes how they become a log: `propose_log`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from recmill.artifacts import InputError
from recmill.data.inspection.columns import EPOCH_UNITS, ColumnFacts, literal, quoted
from recmill.data.inspection.features import DAY_MS, ProposedFeature, find_leaks, measure_repeats, propose_features
from recmill.data.inspection.files import find_tables
from recmill.data.inspection.joins import Match, match_tables
from recmill.data.inspection.outcomes import LabelRule, as_outcomes, choose_label
from recmill.data.inspection.reading import SAMPLE_ROWS, InspectedTable, connect, inspect_table
from recmill.data.inspection.roles import Roles, choose_events, choose_roles
from recmill.progress import Progress, no_progress

GAP = "30min"
GAP_MS = 1_800_000
SPARSE = 0.1  # share of empty days
OF_ONE_ITEM = 0.95  # share of the items with one value only, from which a column describes the item


@dataclass(frozen=True, kw_only=True)
class TimeFacts:
    """The times of the events, and the sessions that a gap would make of them."""

    first: str
    last: str
    spans_ms: int
    has_time_of_day: bool
    num_nulls: int
    middle_ms: int  # between which 98% of the events lie
    num_sessions: int  # with GAP, if no column names the session
    num_days: int  # from the first to the last event
    num_empty_days: int
    is_certain: bool  # False: they can be read in two ways
    are_all_days: bool  # False: only those of a sample of rows, which may lack days that the log has

    @property
    def is_sparse(self) -> bool:
        """So many days are empty that no file is missing: the log is like that."""
        return self.is_certain and self.are_all_days and self.num_empty_days > SPARSE * self.num_days


@dataclass(frozen=True, kw_only=True)
class LogProposal:
    """Everything that a log.yaml says, with the evidence for it."""

    tables: tuple[InspectedTable, ...]
    roles: Roles
    times: TimeFacts
    matches: tuple[Match, ...]
    label: LabelRule
    item_columns: Mapping[str, float]  # columns of the events that describe the item: share of items with one value
    features: tuple[ProposedFeature, ...]
    notes: tuple[str, ...]  # what is ambiguous or deserves a look

    @property
    def used_tables(self) -> list[InspectedTable]:
        used = {self.roles.table.name} | {match.table for match in self.matches}
        if self.label.outcome:
            used.add(self.label.outcome.table)
        return [table for table in self.tables if table.name in used]


def propose_log(
    paths: Sequence[str],
    *,
    events: str = "",
    given: Mapping[str, str] | None = None,
    sample_rows: int = SAMPLE_ROWS,
    progress: Progress = no_progress,
) -> LogProposal:
    """Look at the tables in `paths`; `events` names the table of events and `given` its columns by role."""
    if sample_rows < 1:
        raise InputError(f"the number of rows to look at is {sample_rows}, expected at least 1")
    found = find_tables(paths)
    with closing(connect()) as connection:
        tables = []
        for number, table in enumerate(found, start=1):
            tables.append(inspect_table(connection, table, sample_rows=sample_rows))
            progress("look at tables", number, len(found))
        return _propose(connection, tables, events, given or {})


def _propose(connection: Any, tables: Sequence[InspectedTable], events: str, given: Mapping[str, str]) -> LogProposal:
    log, notes = choose_events(tables, events)
    others = [table for table in tables if table is not log]
    matches = match_tables(connection, log, others)
    roles = choose_roles(connection, log, matches, given, notes)
    # A table that says who did what and when is no side table.
    later = [table for table in others if as_outcomes(roles, table)]
    matches = [match for match in matches if match.table not in {table.name for table in later}]
    label = choose_label(connection, roles, later)
    time_ms = milliseconds(log.column(roles.time.column))
    times = _measure_times(connection, roles, time_ms)
    taken = {choice.column for choice in roles.chosen.values()} | {label.column}
    context = [column for column in log.columns if column.name not in taken and column.nature != "other"]
    features = propose_features(
        roles,
        label,
        [match for match in matches if match.is_clean],
        {table.name: table for table in tables},
        measure_repeats(connection, roles, context, time_ms),
        find_leaks(connection, roles, label, context),
        spans_ms=times.middle_ms,
        has_time_of_day=times.has_time_of_day,
    )
    used = {feature.keys.get("column") for feature in features}
    item_columns = _describing_items(connection, roles, [column for column in context if column.name in used])
    return LogProposal(
        tables=tuple(tables),
        roles=roles,
        times=times,
        matches=tuple(match for match in matches if match.is_clean),
        label=label,
        item_columns=item_columns,
        features=tuple(features),
        notes=(
            *(note for table in tables for note in table.notes),
            *roles.notes,
            *label.notes,
            *_further_notes(roles, times, matches, others, label),
        ),
    )


def _further_notes(
    roles: Roles,
    times: TimeFacts,
    matches: Sequence[Match],
    others: Sequence[InspectedTable],
    label: LabelRule,
) -> list[str]:
    notes = []
    time = roles.table.column(roles.time.column)
    if time.rival_time_form:
        notes.append(f"{time.name}: its times fit {time.time_form} and {time.rival_time_form}; took {time.time_form}.")
    for role in ("user", "item"):
        column = roles.table.column(roles.chosen[role].column)
        if column.num_nulls:
            notes.append(
                f"{column.num_nulls:,} events ({column.null_share:.1%}) have no {role}; events.where leaves them out."
            )
    if times.first < "1990":
        notes.append(f"Times begin at {times.first}: are they years of two digits, or in another unit?")
    if times.num_nulls:
        notes.append(f"{times.num_nulls:,} events have no time that can be read; events.where leaves out the nulls.")
    if times.spans_ms > 2 * times.middle_ms + DAY_MS:
        notes.append(
            f"Times lie between {times.first} and {times.last}, but 98% of the events within "
            f"{times.middle_ms / DAY_MS:,.1f} days: a few times may be wrong."
        )
    if times.num_empty_days:
        days = f"{times.num_empty_days:,} of {times.num_days:,} days have no events"
        days += "" if times.are_all_days else " among the rows looked at"
        allowed = "checks: {empty_days: allow}"
        notes.append(
            f"{days}: so many that this file has {allowed}; if files are missing, add them and remove that line."
            if times.is_sparse
            else f"{days}: is a file missing? recmill prepare refuses such a log, unless you write {allowed}."
        )
    notes += [
        f"{match.table} is not joined: {match.num_duplicates:,} values of {match.key} occur more than once; keep one "
        "row each, or name the column since when a row is valid (valid_from)."
        for match in matches
        if not match.is_clean
    ]
    used = {match.table for match in matches} | ({label.outcome.table} if label.outcome else set())
    return notes + [
        f"{table.name} is not used: it joins no column of {roles.table.name}."
        for table in others
        if table.name not in used
    ]


def milliseconds(column: ColumnFacts) -> str:
    """DuckDB's expression for a column of times in milliseconds since 1970; null where a text is no time."""
    name, form = quoted(column.name), column.time_form
    if form in EPOCH_UNITS:
        scale = EPOCH_UNITS[form]
        return f"({name} * {1000 // scale})" if scale <= 1000 else f"({name} // {scale // 1000})"
    if column.nature == "text":
        parsed = f"try_cast({name} AS TIMESTAMPTZ)" if form == "iso" else f"try_strptime({name}, {literal(form)})"
        return f"epoch_ms({parsed})"
    return f"epoch_ms({name}::TIMESTAMP)"


def _measure_times(connection: Any, roles: Roles, time_ms: str) -> TimeFacts:
    user = quoted(roles.user.column)
    query = f"""
        WITH rows AS (SELECT {time_ms} AS t, {user} AS u FROM {roles.table.view}),
             gaps AS (SELECT t - lag(t) OVER (PARTITION BY u ORDER BY t) AS gap FROM rows WHERE t IS NOT NULL)
        SELECT min(t), max(t), strftime(make_timestamp(min(t) * 1000), '%Y-%m-%d %H:%M'),
               strftime(make_timestamp(max(t) * 1000), '%Y-%m-%d %H:%M'), bool_or(t % 86400000 != 0),
               count(*) - count(t), quantile_disc(t, 0.99) - quantile_disc(t, 0.01),
               (SELECT count(*) FROM gaps WHERE gap IS NULL OR gap > {GAP_MS})
        FROM rows
    """
    row = connection.execute(query).fetchone()
    low, high, first, last, has_time_of_day, num_nulls, middle_ms, num_sessions = row
    if low is None:
        mixed = roles.table.column(roles.time.column).mixed_times
        why = f"; {mixed}; write them in one way" if mixed else ""
        raise InputError(f"{roles.table.found.path}: column {roles.time.column!r} holds no time that can be read{why}")
    # Reading one column of all rows is cheap where a format keeps columns apart.
    are_all_days = not roles.table.is_sample or roles.table.found.format not in ("csv", "jsonl")
    rows = roles.table.whole if are_all_days else roles.table.view
    days = f"SELECT max(d) - min(d) + 1, count(DISTINCT d) FROM (SELECT {time_ms} // {DAY_MS} AS d FROM {rows})"
    num_days, num_full = connection.execute(days).fetchone()
    return TimeFacts(
        first=first,
        last=last,
        spans_ms=high - low,
        has_time_of_day=bool(has_time_of_day),
        num_nulls=num_nulls,
        middle_ms=middle_ms,
        num_sessions=num_sessions,
        num_days=num_days,
        num_empty_days=num_days - num_full,
        is_certain=not roles.table.column(roles.time.column).rival_time_form,
        are_all_days=are_all_days,
    )


def _describing_items(connection: Any, roles: Roles, columns: Sequence[ColumnFacts]) -> dict[str, float]:
    """Columns that have one value per item, and not merely one value per user."""
    found = {}
    for column in columns:
        shares = [
            connection.execute(
                f"SELECT avg((n = 1)::INT) FROM (SELECT count(DISTINCT {quoted(column.name)}) AS n, count(*) AS num "
                f"FROM {roles.table.view} GROUP BY {quoted(choice.column)}) WHERE num > 1"
            ).fetchone()[0]
            for choice in (roles.item, roles.user)
        ]
        of_item, of_user = (0.0 if share is None else float(share) for share in shares)
        if of_item >= OF_ONE_ITEM and of_item > of_user:
            found[column.name] = of_item
    return found
