"""What runs the queries, and the columns of a source as log.yaml names them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ibis
import pyarrow as pa

from recmill.artifacts import InputError
from recmill.data.preparation.sources import SourceFiles, check_columns
from recmill.data.preparation.spec import Condition, JoinSpec, LogSpec, TimeSpec, Where

SEPARATOR = "\x1f"  # of lists that are held as text while they are counted and joined
INT64_DIGITS = 18
UNITS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


class QueryEngine(Protocol):
    """Runs Ibis expressions over sources."""

    def open(self, source: SourceFiles) -> Any:
        """The Ibis table of a source: whole numbers are int64, other numbers float64, times timestamps in UTC."""

    def milliseconds(self, column: Any) -> Any:
        """Milliseconds since 1970 of a timestamp."""

    def hex_number(self, column: Any) -> Any:
        """The number that text of hexadecimal digits stands for."""

    def fetch(self, query: Any) -> pa.Table:
        """All rows of a query."""

    def keep(self, query: Any) -> Any:
        """A table with the rows of the query, computed once."""


def sql_function(name: str, *kinds: str, returns: str) -> Any:
    """An SQL function of the engine as a function of Ibis columns."""

    def function(*_: Any) -> None: ...

    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"column_{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in range(len(kinds))]
    )
    return ibis.udf.scalar.builtin(function, name=name, signature=(kinds, returns))


def cast_of(kind: str) -> str | None:
    """The type that a column of SQL type `kind` is read as; None: as it is."""
    kind = kind.lower()
    if kind.startswith(("timestamp", "datetime")):
        return "timestamp"
    if kind in ("tinyint", "smallint", "int", "integer", "utinyint", "usmallint", "uinteger", "ubigint"):
        return "bigint"
    if kind == "hugeint" or (kind.startswith("decimal") and kind.endswith(",0)") and int(kind[8:-3]) > INT64_DIGITS):
        return "varchar"  # ids of more than 64 bits
    if kind in ("float", "real") or kind.startswith("decimal"):
        return "double"
    return "varchar" if kind.startswith(("enum", "uuid", "char")) else None


def as_text(column: Any) -> Any:
    """A column of lists as text, other columns as they are; nulls inside lists are dropped."""
    return column.cast("array<string>").join(SEPARATOR) if column.type().is_array() else column


def without_nan(column: Any) -> Any:
    """The column with nulls for NaN: with Ibis on Spark NaN is a null, on DuckDB a number above all others."""
    is_float = column.type().is_floating()
    return column.isnan().ifelse(ibis.null(column.type()), column) if is_float else column


@dataclass(frozen=True, kw_only=True)
class ColumnOrigin:
    """A column of the events (`join` is None) or of a join."""

    column: str
    join: int | None = None


@dataclass(frozen=True, kw_only=True)
class SourceTables:
    """The opened sources of a log.yaml."""

    spec: LogSpec
    log_yaml: str
    files: Mapping[str, SourceFiles]
    tables: Mapping[str, Any]
    engine: QueryEngine

    @property
    def events(self) -> Any:
        return self.tables[self.spec.events.source]

    def resolve(self, name: str, place: str) -> ColumnOrigin:
        """Where the column `name`, given at the key `place`, comes from."""
        if name in self.events.columns:
            return ColumnOrigin(column=name)
        prefix, _, column = name.partition(".")
        for number, join in enumerate(self.spec.joins):
            if column and prefix == (join.name or join.source):
                self.check(join.source, {column: place})
                return ColumnOrigin(column=column, join=number)
        self.check(self.spec.events.source, {name: place})
        raise AssertionError("the check has raised")

    def check(self, source: str, wanted: Mapping[str, str]) -> None:
        types = {name: str(kind) for name, kind in self.tables[source].schema().items()}
        check_columns(types, wanted, self.files[source], self.log_yaml)

    def side(self, join: JoinSpec) -> Any:
        return self.tables[join.source]

    def error(self, message: str) -> InputError:
        return InputError(f"{self.log_yaml}: {message}")

    def id_of(self, table: Any, column: str, place: str) -> Any:
        """A column as ids: int64 for whole numbers, else text."""
        found = table[column]
        kind = found.type()
        if kind.is_integer():
            return found
        if kind.is_boolean():
            return found.cast("int64")
        if kind.is_floating():  # pandas stores whole numbers with nulls like this; check_whole raises for others
            return found.cast("int64")
        if kind.is_string() or kind.is_date() or kind.is_timestamp():
            return found.cast("string")
        shown = "empty" if kind.is_unknown() or kind.is_null() else kind  # a file with nulls only names no type
        raise self.error(f"{place}: column {column!r} is {shown}, expected whole numbers or text")

    def time_of(self, table: Any, time: TimeSpec, place: str) -> Any:
        """A column of times as milliseconds since 1970."""
        found = table[time.column]
        kind = found.type()
        if kind.is_integer() or kind.is_floating():
            if time.unit is None:
                raise self.error(f"{place}: column {time.column!r} holds numbers; name their unit (s, ms, us or ns)")
            per_s = UNITS_PER_S[time.unit]
            scaled = found * (1_000 // per_s) if per_s <= 1_000 else (found / (per_s // 1_000)).floor()
            return scaled.cast("int64")
        if kind.is_string():
            # DuckDB ignores the offset of text that becomes a timestamp without a zone.
            found = found.as_timestamp(time.format) if time.format else found.cast("timestamp('UTC')")
        elif kind.is_date():
            found = found.cast("timestamp")
        elif not kind.is_timestamp():
            raise self.error(f"{place}: column {time.column!r} is {kind}, expected times")
        return self.engine.milliseconds(found)

    def meets(self, table: Any, where: Where, place: str) -> Any:
        """Whether a row of `table`, whose columns are named as in log.yaml, meets all conditions."""
        met = ibis.literal(True)
        for number, condition in enumerate(where):
            met &= self._meets_one(without_nan(table[condition.column]), condition, f"{place}[{number}]")
        return met

    def _meets_one(self, column: Any, condition: Condition, place: str) -> Any:
        if condition.is_null is not None:
            return column.isnull() if condition.is_null else column.notnull()
        listed: Sequence[Any] = condition.one_of if condition.one_of is not None else [condition.equals]
        if condition.at_least is None and condition.at_most is None:
            is_text = isinstance(listed[0], str)
            if is_text != column.type().is_string():
                advice = "write numbers without quotes" if is_text else "quote the values"
                raise self.error(f"{place}: column {condition.column!r} is {column.type()}; {advice}")
            return column.isin(list(listed)).fill_null(False)
        if not column.type().is_numeric():
            raise self.error(f"{place}: column {condition.column!r} is {column.type()}, expected numbers")
        met = ibis.literal(True)
        if condition.at_least is not None:
            met &= column >= condition.at_least
        if condition.at_most is not None:
            met &= column <= condition.at_most
        return met.fill_null(False)
