"""What a model could predict: a label column, an action column, a rating, a table of outcomes, or every event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recmill.data.inspection import naming
from recmill.data.inspection.columns import ColumnFacts, quoted
from recmill.data.inspection.joins import are_alike
from recmill.data.inspection.naming import identifier, words
from recmill.data.inspection.reading import InspectedTable
from recmill.data.inspection.roles import LEAST, Roles, time_points

WITHIN = "1d"
LIKED = 0.75  # of the best rating


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """The proposed label: a condition on a column, an outcome in another table, or every event."""

    kind: str  # column, action, rating, outcome, every
    column: str = ""
    rule: str = ""  # one_of, equals or at_least
    value: Any = None
    rate: float | None = None  # share of the events with label 1
    reasons: tuple[str, ...] = ()
    outcome: OutcomeTable | None = None
    notes: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        """The condition as DuckDB writes it; "" without one."""
        if self.kind in ("outcome", "every"):
            return ""
        if self.rule == "one_of":
            return f"{quoted(self.column)} IN ({', '.join(repr(value) for value in self.value)})"
        return f"{quoted(self.column)} {'=' if self.rule == 'equals' else '>='} {self.value}"


@dataclass(frozen=True, kw_only=True)
class OutcomeTable:
    """A table of what happened later, with the columns that match those of the events."""

    table: str
    user: str
    item: str
    time: ColumnFacts


def choose_label(connection: Any, roles: Roles, others: Sequence[InspectedTable]) -> LabelRule:
    """The first of these that the data has: a label, an action, a rating, a table of outcomes, nothing."""
    taken = {choice.column for choice in roles.chosen.values()}
    free = [column for column in roles.table.columns if column.name not in taken]
    found = [
        *(rule for column in free if (rule := _binary(column))),
        *(rule for column in free if (rule := _action(column))),
        *(rule for column in free if (rule := _rating(column))),
        *(rule for table in others if (rule := _outcome(roles, table))),
    ]
    if not found:
        return LabelRule(kind="every", reasons=("no column or table says which events were a success",))
    chosen, rivals = found[0], [_name(rule) for rule in found[1:]]
    notes = [f"{', '.join(rivals)} could be the label too; took {_name(chosen)}."] if rivals else []
    return LabelRule(**{**vars(chosen), "rate": _rate(connection, roles, chosen), "notes": tuple(notes)})


def _name(rule: LabelRule) -> str:
    return rule.outcome.table if rule.outcome else rule.column


def _rate(connection: Any, roles: Roles, rule: LabelRule) -> float | None:
    if not rule.sql:
        return None
    share = connection.execute(f"SELECT avg(coalesce({rule.sql}, false)::INT) FROM {roles.table.view}").fetchone()[0]
    return float(share)


def _binary(column: ColumnFacts) -> LabelRule | None:
    """A column of two values whose name says success."""
    own = words(column.name)
    is_binary = column.nature == "boolean" or (column.nature == "integer" and (column.low, column.high) == (0, 1))
    if not is_binary or column.num_distinct != 2 or not own & naming.LABEL:
        return None
    value = True if column.nature == "boolean" else 1
    return LabelRule(
        kind="column", column=column.name, rule="equals", value=value, reasons=("its name says success, two values",)
    )


def _action(column: ColumnFacts) -> LabelRule | None:
    """A column of few words, some of which say more than a look."""
    if column.nature != "text" or not column.top:
        return None
    actions = {value: _plain(value) for value, _ in column.top}
    strong = sorted(value for value, plain in actions.items() if plain in naming.STRONG_ACTIONS)
    weak = sorted(value for value, plain in actions.items() if plain in naming.WEAK_ACTIONS)
    if len(strong) + len(weak) < len(actions) / 2 or not strong:
        return None
    if not weak:
        # Without looks the weakest actions are those that happen most.
        if len(strong) < 2:
            return None
        weak = [next(value for value, _ in column.top if value in strong)]
        strong = [value for value in strong if value not in weak]
    unknown = sorted(set(actions) - set(strong) - set(weak))
    counts = ", ".join(f"{value} {count / column.num_rows:.1%}" for value, count in column.top)
    notes = (f"{column.name}: took {', '.join(unknown)} as label 0.",) if unknown else ()
    reasons = (f"its values are actions ({counts})", f"more than {', '.join(weak)} is a success")
    return LabelRule(
        kind="action", column=column.name, rule="one_of", value=tuple(strong), reasons=reasons, notes=notes
    )


def _plain(value: Any) -> str:
    return identifier(str(value))


def _rating(column: ColumnFacts) -> LabelRule | None:
    """A column of a few numbers up to 5, 10 or 100, named like a rating or not named at all."""
    if column.nature not in ("integer", "number") or not column.top or column.num_distinct < 3:
        return None
    is_named, is_nameless = words(column.name) & naming.RATING, column.name.startswith("column")
    if not is_named and not (is_nameless and column.high in (5, 10) and column.low >= 0):
        return None
    best = float(column.high)
    liked = min(float(value) for value, _ in column.top if float(value) >= LIKED * best)
    value = int(liked) if liked.is_integer() else liked
    reasons = (f"its values are {column.low:g} to {best:g}", f"{value:g} or more is a success")
    return LabelRule(kind="rating", column=column.name, rule="at_least", value=value, reasons=reasons)


def _outcome(roles: Roles, table: InspectedTable) -> LabelRule | None:
    """A table that names a user, an item and a time as the events do."""
    if (found := as_outcomes(roles, table)) is None:
        return None
    own = words(table.name)
    if not own & naming.OUTCOMES:
        return None
    reasons = (
        f"{table.name} has the same users and items, and times",
        f"within {WITHIN} is a guess: choose the window",
    )
    return LabelRule(kind="outcome", outcome=found, reasons=reasons)


def as_outcomes(roles: Roles, table: InspectedTable) -> OutcomeTable | None:
    """The columns of a table that say who, what and when, if it has all three."""
    columns = {column.name: column for column in table.columns}
    user = _same(columns.values(), roles.table.column(roles.user.column))
    item = _same(columns.values(), roles.table.column(roles.item.column))
    times = [column for column in columns.values() if time_points(column)[0] >= LEAST]
    if user is None or item is None or user == item or not times:
        return None
    time = max(times, key=lambda column: time_points(column)[0])
    return OutcomeTable(table=table.name, user=user, item=item, time=time)


def _same(columns: Any, wanted: ColumnFacts) -> str | None:
    return next((c.name for c in columns if c.nature == wanted.nature and are_alike(c, wanted)), None)
