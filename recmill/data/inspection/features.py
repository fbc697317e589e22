"""Proposes features: a kind, a table and a width for every column that may help, a reason for each that is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recmill.data.checks.single_values import TELLING, auc_of_values
from recmill.data.inspection import naming
from recmill.data.inspection.columns import ColumnFacts, nature_of, quoted
from recmill.data.inspection.joins import Match
from recmill.data.inspection.naming import identifier, words
from recmill.data.inspection.outcomes import LabelRule
from recmill.data.inspection.reading import InspectedTable
from recmill.data.inspection.roles import Roles
from recmill.data.schema import KEY_COLUMNS

HISTORY_LENGTH = 50
MAX_VOCABULARY = 5_000_000  # values; more are hashed
MANY = 10_000  # values, of which those that occur once share a row
MANY_NUMBERS = 12  # distinct whole numbers, below which they are categories whatever their name
WIDTHS = ((16, 4), (1_000, 8), (100_000, 16))  # up to so many values: so wide; more: 32
SKEW = 10.0  # highest value over the median, from which the logarithm is taken
DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class ProposedFeature:
    """One line of `features`, with its evidence; or, with `left_out`, a column that is no feature and why."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = ""
    left_out: str = ""


def width_of(num_values: int) -> int:
    return next((width for most, width in WIDTHS if num_values <= most), 32)


def propose_features(
    roles: Roles,
    label: LabelRule,
    matches: Sequence[Match],
    tables: Mapping[str, InspectedTable],
    repeats: Mapping[str, float],
    leaks: Mapping[str, float],
    *,
    spans_ms: int,
    has_time_of_day: bool,
) -> list[ProposedFeature]:
    """Features in reading order: the user, what is known of it, the context, the history, the item, the time."""
    names = _Names()
    sides = {match.column: [m for m in matches if m.column == match.column] for match in matches}
    user, item = (roles.table.column(choice.column) for choice in (roles.user, roles.item))

    def of_column(column: ColumnFacts) -> ProposedFeature:
        if column.name in leaks:
            why = f"predicts the label alone (AUC {leaks[column.name]:.3f}): it is probably known only afterwards"
            return ProposedFeature(name=column.name, left_out=why)
        return _of_column(column, names, repeats.get(column.name), {})

    def of_sides(column: str, **more: Any) -> Iterator[ProposedFeature]:
        for match in sides.get(column, []):
            for own in tables[match.table].columns:
                if own.name not in (match.key, match.valid_from):
                    yield _of_column(own, names, None, more, prefix=f"{match.table}.")

    taken = {choice.column for choice in roles.chosen.values()} | {label.column}
    context = [column for column in roles.table.columns if column.name not in taken]
    found = [
        _id_feature(user, names, group="user"),
        *of_sides(user.name, group="user"),
        *(of_column(column) for column in context),
        *(feature for column in context for feature in of_sides(column.name)),
        _id_feature(item, names),
        *of_sides(item.name),
    ]
    history = {
        "history": {"of": item.name, "last": HISTORY_LENGTH},
        "kind": "sequence",
        "table": found_name(found, item),
    }
    evidence = f"{user.rows_per_value:.1f} events per user"
    found.append(ProposedFeature(name=names.take("history", "events"), keys=history, evidence=evidence))
    return [*found, *_time_features(names, spans_ms, has_time_of_day)]


def found_name(features: Sequence[ProposedFeature], column: ColumnFacts) -> str:
    return next(feature.name for feature in features if feature.keys.get("column") == column.name)


class _Names:
    """Names of features: the column's, with the table's in front where two columns share it."""

    def __init__(self) -> None:
        self.taken: set[str] = {*KEY_COLUMNS}

    def take(self, wanted: str, table: str) -> str:
        name = identifier(wanted)
        if name in self.taken:
            name = f"{identifier(table)}_{name}"
        number, unique = 2, name
        while unique in self.taken:
            unique, number = f"{name}_{number}", number + 1
        self.taken.add(unique)
        return unique


def _id_feature(column: ColumnFacts, names: _Names, **more: Any) -> ProposedFeature:
    keys = {"column": column.name, "kind": "sparse", **_rows(column), "dim": width_of(column.num_distinct), **more}
    evidence = f"{column.num_distinct:,} distinct, {column.rows_per_value:.1f} events per value"
    return ProposedFeature(name=names.take(column.name, column.table), keys=keys, evidence=evidence)


def _rows(column: ColumnFacts) -> dict[str, Any]:
    """A vocabulary, without the values that occur once if there are many; a hash for more than fit one."""
    if column.num_distinct > MAX_VOCABULARY:
        return {"rows": {"hash": 2 * MAX_VOCABULARY}}
    return {"rows": {"min_count": 2}} if column.num_distinct > MANY else {}


def _of_column(
    column: ColumnFacts, names: _Names, repeat: float | None, more: Mapping[str, Any], prefix: str = ""
) -> ProposedFeature:
    name = f"{prefix}{column.name}"
    if reason := _reason_to_leave_out(column, is_side=bool(prefix)):
        return ProposedFeature(name=name, left_out=reason)
    evidence = column.describe() + ("" if repeat is None else f", {repeat:.0%} as in the user's event before")
    if is_amount(column):
        keys: dict[str, Any] = {"column": name, "kind": "dense", "transform": [*_logarithm(column), "standardise"]}
    else:
        keys = {"column": name, "kind": "sparse", **_rows(column), "dim": width_of(column.num_distinct), **more}
        if column.separator:
            keys = {"column": name, "separator": column.separator, **keys}
            evidence += f"; texts look like lists with {column.separator!r} between"
        if column.separator or column.nature == "list":
            evidence += "; if their order matters, write kind: sequence"
        if column.nature == "integer" and column.num_distinct > MANY_NUMBERS:
            evidence += "; whole numbers read as ids: if it is an amount, write kind: dense and no dim"
    return ProposedFeature(name=names.take(column.name, column.table), keys=keys, evidence=evidence)


def _reason_to_leave_out(column: ColumnFacts, *, is_side: bool) -> str:
    if column.nature == "other":
        return f"its type {column.type} is no value; name a field of it in a view"
    if column.nature == "list" and nature_of(column.type[:-2]) not in ("integer", "text"):
        return f"a list of {column.type[:-2]}; only lists of whole numbers or text are read"
    if column.num_known == 0:
        return "all values are null"
    if column.num_distinct == 1:
        return f"one value only ({column.examples[0]})"
    if column.time_form:
        return "a time other than the event's"
    if words(column.name) & naming.SESSION and words(column.name) & naming.AMOUNT:
        return "known only when the session is over"
    if column.nature == "text" and not column.separator and column.rows_per_value < 1.1:
        what = "key" if is_side else "row"
        return f"nearly every {what} has a text of its own ({column.describe()})"
    if column.nature == "integer" and column.is_unique and words(column.name) & naming.IDENTITY:
        return "numbers the rows"
    return ""


def is_amount(column: ColumnFacts) -> bool:
    """Numbers with a fraction, and whole numbers whose name says amount."""
    if column.nature == "number":
        return True
    is_named = bool(words(column.name) & naming.AMOUNT) and not words(column.name) & naming.IDENTITY
    return column.nature == "integer" and is_named and column.num_distinct > MANY_NUMBERS


def _logarithm(column: ColumnFacts) -> list[str]:
    middle = column.median or 0.0
    return ["log1p"] if column.low >= 0 and float(column.high) > SKEW * max(middle, 1e-9) else []


def _time_features(names: _Names, spans_ms: int, has_time_of_day: bool) -> Iterator[ProposedFeature]:
    days = spans_ms / DAY_MS
    for kind, is_useful, why in (
        ("hour_of_day", has_time_of_day and days > 1, "times have a time of day"),
        ("day_of_week", days > 7, f"the log spans {days:,.0f} days"),
    ):
        if is_useful:
            yield ProposedFeature(name=names.take(kind, "event"), keys={"time": kind, "dim": 4}, evidence=why)


def measure_repeats(connection: Any, roles: Roles, columns: Sequence[ColumnFacts], time_ms: str) -> dict[str, float]:
    """For each column the share of events whose value is that of the same user's event before."""
    if not columns:
        return {}
    user = quoted(roles.user.column)
    order = f"OVER (PARTITION BY {user} ORDER BY {time_ms}, rowid)"
    tests = [
        f"avg(({quoted(c.name)} IS NOT DISTINCT FROM before_{n})::INT) FILTER (is_later)" for n, c in enumerate(columns)
    ]
    lags = [f"lag({quoted(column.name)}) {order} AS before_{n}" for n, column in enumerate(columns)]
    inner = f"SELECT *, {', '.join(lags)}, row_number() {order} > 1 AS is_later FROM {roles.table.view}"
    found = connection.execute(f"SELECT {', '.join(tests)} FROM ({inner})").fetchone()
    return {column.name: float(share) for column, share in zip(columns, found, strict=True) if share is not None}


def find_leaks(connection: Any, roles: Roles, label: LabelRule, columns: Sequence[ColumnFacts]) -> dict[str, float]:
    """Columns that tell successes from other events alone, with their AUC; users are halved to tell chance apart."""
    if not label.sql:
        return {}
    found = {}
    for column in columns:
        name, user = quoted(column.name), quoted(roles.user.column)
        value = name if column.nature in ("integer", "number", "text", "boolean") else f"({name} IS NULL)"
        groups = connection.execute(
            f"SELECT coalesce({value}::VARCHAR, '') AS v, (hash({user}) % 2)::INT AS h, count(*)::DOUBLE AS n, "
            f"count(*) FILTER ({label.sql})::DOUBLE AS p FROM {roles.table.view} GROUP BY ALL ORDER BY ALL"
        ).fetchnumpy()
        auc = auc_of_values(*(np.asarray(groups[key]) for key in "vhnp"))
        if auc >= TELLING:
            found[column.name] = auc
    return found
