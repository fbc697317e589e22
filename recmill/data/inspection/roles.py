"""Which table holds the events, and which of its columns are the user, the item, the time, the session, the request.

Every rule adds or takes points and says why; the column with the most points takes the role, and columns that come
close are named as rivals. The points are small whole numbers so that a reader can add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

from recmill.artifacts import InputError
from recmill.data.inspection import naming
from recmill.data.inspection.columns import ColumnFacts, quoted
from recmill.data.inspection.joins import Match
from recmill.data.inspection.naming import words
from recmill.data.inspection.reading import InspectedTable

CLOSE = 2  # points between a choice and a rival that is worth naming
LEAST = 3  # points that a column needs for a role

Scored = tuple[float, list[str]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The column that takes a role, why, and which others came close."""

    role: str
    column: str
    points: float
    reasons: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    is_given: bool = False  # named on the command line

    def to_json(self) -> dict[str, Any]:
        return {"column": self.column, "points": self.points, "why": list(self.reasons), "rivals": list(self.rivals)}


@dataclass(frozen=True, kw_only=True)
class Roles:
    table: InspectedTable
    user: Choice
    item: Choice
    time: Choice
    session: Choice | None = None
    request: Choice | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> dict[str, Choice]:
        named = {"user": self.user, "item": self.item, "time": self.time}
        return named | {c.role: c for c in (self.session, self.request) if c is not None}


def choose_events(tables: Sequence[InspectedTable], given: str = "") -> tuple[InspectedTable, list[str]]:
    """The table whose rows are events, and what is to be said about the choice."""
    if given:
        return _named_table(tables, given), []
    scored = sorted(((_events_points(table), table) for table in tables), key=lambda pair: (-pair[0][0], pair[1].name))
    (points, reasons), best = scored[0]
    if not any(time_points(column)[0] >= LEAST for column in best.columns):
        listed = ", ".join(table.name for table in tables)
        raise InputError(
            f"none of the tables ({listed}) has a column of times, which a log of events needs{_mixed_times(tables)}"
        )
    return best, [
        f"{table.name} looks like events too; took {best.name}: {'; '.join(reasons)}. If {table.name} is the log, "
        f"rerun with --events {table.name}."
        for (other, _), table in scored[1:]
        if points - other < CLOSE
    ]


def _mixed_times(tables: Sequence[InspectedTable]) -> str:
    """The first column that is a time in a part of its rows, as the end of a sentence."""
    mixed = [column for table in tables for column in table.columns if column.mixed_times]
    return f"; {mixed[0].label}: {mixed[0].mixed_times}; write them in one way" if mixed else ""


def _named_table(tables: Sequence[InspectedTable], name: str) -> InspectedTable:
    found = next((table for table in tables if table.name == name), None)
    if found is None:
        raise InputError(f"--events {name}: no such table; found {', '.join(table.name for table in tables)}")
    return found


def _events_points(table: InspectedTable) -> Scored:
    own = words(table.name)
    columns = table.columns
    points, reasons = log10(max(1, table.num_total or table.num_rows)) / 2, []
    for has, value, reason in (
        (any(time_points(c)[0] >= LEAST for c in columns), 3, "it has a column of times"),
        (any(words(c.name) & naming.USER for c in columns), 2, "a column is named like a user"),
        (any(words(c.name) & naming.ITEM for c in columns), 2, "a column is named like an item"),
        (bool(own & naming.EVENTS), 2, "its name says so"),
        (bool(own & (naming.USER | naming.ITEM)) and not own & naming.EVENTS, -4, "it is named like a side table"),
        (bool(own & naming.OUTCOMES), -1, "it is named like outcomes"),
        # Keys of a side table occur once; users and items of a log do not.
        (any(c.is_unique and c.can_be_id and words(c.name) & naming.IDENTITY for c in columns[:1]), -1, "it has a key"),
    ):
        if has:
            points += value
            reasons += [reason] if value > 0 else []
    return points, [*reasons, f"{table.num_rows:,} rows"]


def time_points(column: ColumnFacts) -> Scored:
    """How much a column looks like the time of its row."""
    if not column.time_form:
        return 0, []
    own = words(column.name)
    points, reasons = 3, [f"its values are times ({describe_form(column.time_form)})"]
    for has, value, reason in (
        (bool(own & naming.TIME), 2, "its name says time"),
        (bool(own & naming.IDENTITY), -4, "its name says id"),
        (bool(own & naming.BOOKKEEPING), -3, "its name says when the row was stored"),
        (bool(own & naming.BEGINNING), -2, "its name says when something began"),
        (column.null_share > 0, -1, f"{column.null_share:.1%} are null"),
        (column.time_form in ("date", "%Y%m%d", "%d/%m/%Y"), -1, "it has no time of day"),
        (column.rows_per_value < 3, 1, "it changes from row to row"),
    ):
        if has:
            points += value
            reasons.append(reason)
    return points, reasons


def describe_form(form: str) -> str:
    units = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    if form in units:
        return f"{units[form]} since 1970"
    return {"timestamp": "timestamps", "date": "dates", "iso": "ISO 8601 text"}.get(form, f"text like {form}")


def id_points(column: ColumnFacts, role: str, matches: Sequence[Match]) -> Scored:
    """How much a column looks like the id of the user or of the item."""
    if not column.can_be_id or column.time_form:
        return -10, []
    wanted, other = (naming.USER, naming.ITEM) if role == "user" else (naming.ITEM, naming.USER)
    own = words(column.name)
    joined = [match for match in matches if match.column == column.name]
    side = {word for match in joined for word in words(match.table)}
    points, reasons = 0.0, []
    for has, value, reason in (
        (bool(own & wanted), 4, f"its name says {role}"),
        (bool(own & other), -4, ""),
        (bool(own & (naming.SESSION | naming.REQUEST | naming.AMOUNT | naming.RATING | naming.ACTION)), -4, ""),
        (bool(own & naming.IDENTITY), 1, "its name says id"),
        (bool(side & wanted), 3, f"it joins {', '.join(match.table for match in joined)}"),
        (bool(side & other), -3, ""),
        (column.rows_per_value >= 1.2, 1, f"{column.rows_per_value:.1f} rows per value"),
        (column.is_unique, -3, ""),
        (column.num_distinct <= 10 and column.num_rows > 1000, -2, ""),
    ):
        if has:
            points += value
            reasons += [reason] if reason else []
    return points, reasons


def choose(role: str, columns: Sequence[ColumnFacts], score: Callable[[ColumnFacts], Scored]) -> Choice | None:
    """The column with the most points, the first of equals; None if none has enough."""
    scored = sorted(
        ((score(column), n, column.name) for n, column in enumerate(columns)), key=lambda s: (-s[0][0], s[1])
    )
    if not scored or scored[0][0][0] < LEAST:
        return None
    (points, reasons), _, name = scored[0]
    rivals = tuple(other for (own, _), _, other in scored[1:] if own >= LEAST and points - own < CLOSE)
    return Choice(role=role, column=name, points=points, reasons=tuple(reasons), rivals=rivals)


def choose_roles(
    connection: Any,
    table: InspectedTable,
    matches: Sequence[Match],
    given: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Roles:
    """The columns of the events by role; `given` names some of them, and the evidence chooses the others."""
    for role, name in given.items():
        if name and name not in {column.name for column in table.columns}:
            has = ", ".join(column.name for column in table.columns)
            raise InputError(f"--{role} {name}: {table.found.path} has no such column; it has {has}")
    found: dict[str, Choice] = {
        role: Choice(role=role, column=name, points=10, reasons=("named by you",), is_given=True)
        for role, name in given.items()
        if name
    }
    said = list(notes)
    free = [column for column in table.columns if column.name not in {c.column for c in found.values()}]

    def settle(role: str, score: Callable[[ColumnFacts], Scored]) -> None:
        if role not in found and (choice := choose(role, free, score)):
            found[role] = choice
        if role in found:
            free[:] = [column for column in free if column.name != found[role].column]

    settle("time", time_points)
    if "time" not in found:
        raise InputError(
            f"{table.found.path}: no column looks like the time of an event; name it with --time COLUMN"
            + _mixed_times([table])
        )
    settle("session", lambda c: _inner_points(c, naming.SESSION))
    settle("request", lambda c: _inner_points(c, naming.REQUEST))
    settle("user", lambda c: id_points(c, "user", matches))
    settle("item", lambda c: id_points(c, "item", matches))
    if "user" not in found and "session" in found:
        found["user"] = Choice(
            role="user", column=found["session"].column, points=0, reasons=("no column looks like a user: the session",)
        )
    said += _settle_by_position(found, free)
    for role in ("user", "item"):
        if role not in found:
            raise InputError(
                f"{table.found.path}: no column looks like the {role} (columns: "
                f"{', '.join(column.name for column in table.columns)}); name it with --{role} COLUMN"
            )
    for role in ("session", "request"):
        said += _refuse_if_mixed(connection, table, found, role)
    said += [_rivals_note(choice) for choice in found.values() if choice.rivals]
    return Roles(
        table=table,
        user=found["user"],
        item=found["item"],
        time=found["time"],
        session=found.get("session"),
        request=found.get("request"),
        notes=tuple(said),
    )


def _rivals_note(choice: Choice) -> str:
    names = ", ".join((choice.column, *choice.rivals))
    reason = choice.reasons[-1] if choice.reasons else "it comes first"
    return f"{1 + len(choice.rivals)} columns look like the {choice.role}: {names}; took {choice.column}: {reason}."


def _inner_points(column: ColumnFacts, wanted: set[str]) -> Scored:
    """How much a column looks like the id of a session or request: several rows per value, none for all."""
    own = words(column.name)
    if not own & wanted or column.nature not in ("integer", "text") or column.rows_per_value < 1.05:
        return 0, []
    # session_size and session_start describe a session and do not identify it.
    describes = own & (naming.AMOUNT | naming.TIME | naming.BEGINNING)
    if describes or column.null_share > 0 or column.num_distinct < 10:
        return 0, []
    points = 4 + bool(own & naming.IDENTITY)
    return points, ["its name says so", f"{column.rows_per_value:.1f} events per value"]


def _settle_by_position(found: dict[str, Choice], free: list[ColumnFacts]) -> list[str]:
    """Columns whose names say nothing: the first id column is the user, the next one the item, and this is said."""
    notes = []
    for role in ("user", "item"):
        ids = [c for c in free if c.can_be_id and not c.time_form and not c.is_unique and c.num_distinct > 10]
        if role in found or not ids:
            continue
        found[role] = Choice(role=role, column=ids[0].name, points=0, reasons=("the first column of ids left",))
        free.remove(ids[0])
        notes.append(
            f"No column's name says {role}: took {ids[0].name}, the first column of repeated ids; "
            f"if that is wrong, rerun with --{role} COLUMN."
        )
    return notes


def _refuse_if_mixed(connection: Any, table: InspectedTable, found: dict[str, Choice], role: str) -> list[str]:
    """A session or request of several users is none: drop the choice and say so."""
    if role not in found or found[role].is_given or found[role].column == found["user"].column:
        return []
    inner, user = quoted(found[role].column), quoted(found["user"].column)
    query = f"SELECT avg((n = 1)::INT) FROM (SELECT count(DISTINCT {user}) AS n FROM {table.view} GROUP BY {inner})"
    share = connection.execute(query).fetchone()[0]
    if share >= 0.95:
        return []
    name = found.pop(role).column
    return [f"{name} is named like a {role}, but only {share:.0%} of its values belong to one user: not used."]
