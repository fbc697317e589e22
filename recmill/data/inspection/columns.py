"""What the values of a column are: type, nulls, distinct values, range, examples; measured by DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recmill.data.inspection.naming import IDENTITY, ITEM, SESSION, TIME, USER, words

MAX_TOP_VALUES = 12
MAX_EXAMPLES = 3
# Whole numbers that are times: those between 1990 and 2100, by unit.
EPOCH_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
EARLIEST_S, LATEST_S = 631_152_000, 4_102_444_800
# Texts that are times, besides those that DuckDB casts itself (ISO 8601).
TIME_FORMATS: tuple[str, ...] = (
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M:%S",
    "%m/%d/%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
)
TIME_FORMATS += ("%d.%m.%Y %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y%m%d%H%M%S", "%Y%m%d")
TIME_FORMATS += ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%a %b %d %H:%M:%S %Y", "%b %d %Y %H:%M:%S")
ENOUGH = 0.99  # of the values that must parse
PARTLY = 0.1  # from which a text is said to be partly a time


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """One column of a table, or of the sample that was looked at."""

    table: str
    name: str
    type: str  # as DuckDB names it
    nature: str  # integer, number, boolean, text, timestamp, date, list, other
    num_rows: int
    num_nulls: int
    num_distinct: int
    low: Any = None
    high: Any = None
    mean: float | None = None
    median: float | None = None
    top: tuple[tuple[Any, int], ...] = ()  # most frequent values, most frequent first; only where there are few
    examples: tuple[str, ...] = ()
    # How a time is written: "timestamp", "date", a unit of EPOCH_UNITS, "iso", or a strptime pattern; "": no time.
    time_form: str = ""
    rival_time_form: str = ""  # another pattern that fits all values as well
    mixed_times: str = ""  # what is said of a column of which only a part are times in one form
    separator: str = ""  # of texts that are lists, such as Drama|Musical

    @property
    def label(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def num_known(self) -> int:
        return self.num_rows - self.num_nulls

    @property
    def null_share(self) -> float:
        return self.num_nulls / max(1, self.num_rows)

    @property
    def rows_per_value(self) -> float:
        return self.num_known / max(1, self.num_distinct)

    @property
    def is_unique(self) -> bool:
        return self.num_known > 1 and self.num_distinct == self.num_known

    @property
    def can_be_id(self) -> bool:
        return self.nature in ("integer", "text") and self.num_distinct > 1

    def describe(self) -> str:
        """The evidence in a few words, as the comments of log.yaml show it."""
        parts = [f"{self.num_distinct:,} distinct"]
        if self.num_nulls:
            parts.append(f"{self.null_share:.1%} null" if self.null_share >= 0.001 else f"{self.num_nulls:,} null")
        if self.nature in ("number", "integer") and self.low is not None and not self.time_form:
            parts.append(f"{short(self.low)} to {short(self.high)}")
        if self.examples:
            parts.append(f"e.g. {', '.join(self.examples)}")
        return ", ".join(parts)


def short(value: Any) -> str:
    """A value as a comment shows it: on one line, cut after 24 characters."""
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= 24 else text[:21] + "..."


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as DuckDB's queries write it."""
    return "'" + text.replace("'", "''") + "'"


def nature_of(type_name: str) -> str:
    kind = type_name.upper()
    if kind.endswith("]"):
        return "list"
    if kind == "BOOLEAN":
        return "boolean"
    if kind.endswith(("INT", "INTEGER")):
        return "integer"
    if kind.startswith(("DOUBLE", "FLOAT", "REAL", "DECIMAL")):
        return "number"
    if kind.startswith("TIMESTAMP"):
        return "timestamp"
    if kind == "DATE":
        return "date"
    return "text" if kind in ("VARCHAR", "UUID") or kind.startswith("ENUM") else "other"


def measure_columns(connection: Any, table: str, view: str) -> tuple[ColumnFacts, ...]:
    """The facts of every column of `view`, a table or view that DuckDB knows; `table` is its name for people."""
    described = connection.execute(f"DESCRIBE {view}").fetchall()
    types = {row[0]: row[1] for row in described}
    num_rows = connection.execute(f"SELECT count(*) FROM {view}").fetchone()[0]
    return tuple(_measure(connection, table, view, name, kind, num_rows) for name, kind in types.items())


def _measure(connection: Any, table: str, view: str, name: str, kind: str, num_rows: int) -> ColumnFacts:
    column, nature = quoted(name), nature_of(kind)
    known: dict[str, Any] = {"table": table, "name": name, "type": kind, "nature": nature, "num_rows": num_rows}
    if nature == "other":
        nulls = connection.execute(f"SELECT count(*) - count({column}) FROM {view}").fetchone()[0]
        return ColumnFacts(**known, num_nulls=nulls, num_distinct=0)
    values = f"unnest({column})" if nature == "list" else column
    if nature == "timestamp":
        values = f"{column}::TIMESTAMP"  # those with a zone need pytz in Python
    is_number = nature in ("integer", "number")
    numbers = "avg(v::DOUBLE), median(v::DOUBLE)" if is_number else "NULL, NULL"
    query = f"SELECT count(DISTINCT v), min(v), max(v), {numbers} FROM (SELECT {values} AS v FROM {view})"
    num_distinct, low, high, mean, median = connection.execute(query).fetchone()
    nulls = connection.execute(f"SELECT count(*) - count({column}) FROM {view}").fetchone()[0]
    ranked = connection.execute(
        f"SELECT v, count(*) FROM (SELECT {values} AS v FROM {view}) WHERE v IS NOT NULL "
        f"GROUP BY v ORDER BY count(*) DESC, v LIMIT {MAX_TOP_VALUES}"
    ).fetchall()
    facts = ColumnFacts(
        **known,
        num_nulls=nulls,
        num_distinct=num_distinct,
        low=low,
        high=high,
        mean=mean,
        median=median,
        top=tuple(ranked) if num_distinct <= MAX_TOP_VALUES else (),
        examples=tuple(short(value) for value, _ in ranked[:MAX_EXAMPLES]),
    )
    return _with_text_forms(connection, view, facts)


def _with_text_forms(connection: Any, view: str, facts: ColumnFacts) -> ColumnFacts:
    """The facts with the forms that hide in plain values: times in numbers and texts, lists in texts."""
    if facts.nature in ("timestamp", "date"):
        return replace(facts, time_form=facts.nature)
    if facts.nature == "integer" and facts.num_distinct > 1:
        # Ids of 19 digits are times in nanoseconds too.
        if words(facts.name) & (IDENTITY | USER | ITEM | SESSION) and not words(facts.name) & TIME:
            return facts
        return replace(facts, time_form=epoch_unit(facts.low, facts.high))
    if facts.nature != "text" or not facts.num_known:
        return facts
    column = quoted(facts.name)
    shares = _shares_of_times(connection, view, column)
    forms = [form for form, share in shares.items() if share >= ENOUGH]
    if forms:
        rivals = [] if forms[0] == "iso" else forms[1:]
        return replace(facts, time_form=forms[0], rival_time_form=rivals[0] if rivals else "")
    best = max(shares, key=lambda form: shares[form])
    if shares[best] >= PARTLY:
        return replace(facts, mixed_times=_describe_mixed(connection, view, column, best, shares[best]))
    return replace(facts, separator=_separator(connection, view, column, facts))


def epoch_unit(low: int, high: int) -> str:
    """The unit in which all numbers from `low` to `high` are times between 1990 and 2100; "" if there is none."""
    fitting = (unit for unit, scale in EPOCH_UNITS.items() if EARLIEST_S * scale <= low and high <= LATEST_S * scale)
    return next(fitting, "")


def _parsed(column: str, form: str) -> str:
    # A plain year or number casts to no timestamp, so ids do not pass.
    return f"try_cast({column} AS TIMESTAMP)" if form == "iso" else f"try_strptime({column}, '{form}')"


def _shares_of_times(connection: Any, view: str, column: str) -> dict[str, float]:
    """The share of the values that are times, by form."""
    forms = ("iso", *TIME_FORMATS)
    tests = ", ".join(f"count({_parsed(column, form)}) / count({column})" for form in forms)
    return dict(zip(forms, connection.execute(f"SELECT {tests} FROM {view}").fetchone(), strict=True))


def _describe_mixed(connection: Any, view: str, column: str, form: str, share: float) -> str:
    query = f"SELECT {column} FROM {view} WHERE {_parsed(column, form)} IS NULL AND {column} IS NOT NULL LIMIT 1"
    other = connection.execute(query).fetchone()[0]
    shown = "ISO 8601" if form == "iso" else form
    return f"{share:.1%} of its values are times as {shown}, others are not, such as {short(other)!r}"


def _separator(connection: Any, view: str, column: str, facts: ColumnFacts) -> str:
    """The character that separates the elements of a text, if its parts repeat much more than the whole."""
    for mark in ("|", ";"):
        query = (
            f"SELECT avg((contains({column}, '{mark}'))::INT) FROM {view} WHERE {column} IS NOT NULL",
            f"SELECT count(DISTINCT part) FROM (SELECT unnest(string_split({column}, '{mark}')) AS part FROM {view})",
        )
        share, num_parts = (connection.execute(text).fetchone()[0] for text in query)
        if share and share >= 0.2 and num_parts < facts.num_distinct:
            return mark
    return ""


def find_column(columns: Sequence[ColumnFacts], name: str) -> ColumnFacts | None:
    return next((column for column in columns if column.name == name), None)
