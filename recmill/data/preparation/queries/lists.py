"""Columns that hold several values per row: lists, or text with a separator ("a|b|c").

Every distinct list gets a code, which travels through joins, negatives and sorting like any number. The rows of its
elements are looked up when samples are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ibis
import numpy as np

from recmill.data.preparation.queries.codes import number_values, rows_of
from recmill.data.preparation.queries.events import EventTable, is_key
from recmill.data.preparation.queries.joins import SideTable
from recmill.data.preparation.queries.tables import SEPARATOR, ColumnOrigin, QueryEngine, SourceTables
from recmill.data.preparation.samples.attributes import ListTable
from recmill.data.preparation.spec import FeatureSpec
from recmill.data.sources.lists import numbers_of


def _separator_of(tables: SourceTables, feature: FeatureSpec, origin: ColumnOrigin) -> tuple[str, bool]:
    """What separates the values of a feature's column ("" if it has one per row), and whether they are numbers."""
    source = tables.events if origin.join is None else tables.side(tables.spec.joins[origin.join])
    kind, place = source[origin.column].type(), f"features: {feature.name!r}: column {origin.column!r}"
    if not kind.is_array():
        if feature.separator and not kind.is_string():
            raise tables.error(f"{place} is {kind}, expected text for separator {feature.separator!r}")
        if feature.kind_or_default == "sequence" and feature.column and not feature.separator:
            raise tables.error(f"{place} is {kind}, expected a list for kind sequence; name the separator of text")
        return feature.separator, False
    if feature.separator or feature.history or feature.kind_or_default == "dense":
        what = "a separator" if feature.separator else "a history" if feature.history else "kind dense"
        raise tables.error(f"{place} is {kind}: {what} is for columns with one value per row")
    if not (kind.value_type.is_integer() or kind.value_type.is_string()):
        raise tables.error(f"{place} is {kind}, expected lists of whole numbers or text")
    return SEPARATOR, bool(kind.value_type.is_integer())


@dataclass(frozen=True, kw_only=True)
class ValueLists:
    """The distinct lists of a column; `codes` has `value` (text), `count` (events) and `code`."""

    codes: Any
    elements: Any  # code, place, count, value

    @classmethod
    def of(cls, values: Any, separator: str, engine: QueryEngine, *, are_numbers: bool) -> ValueLists:
        """From a table `value` (text) and `weight`, how many events have it."""
        found = number_values(values, engine)
        codes = engine.keep(found.select("value", "code", count=found.weight))
        text = codes.value.replace(separator, SEPARATOR)  # Spark splits by a regular expression
        parts = codes.select("code", "count", part=text.split(SEPARATOR)).unnest("part", offset="place")
        parts = parts.mutate(part=parts.part.strip())
        parts = parts.filter(parts.part != "")
        value = parts.part.cast("int64") if are_numbers else parts.part
        return cls(codes=codes, elements=engine.keep(parts.select("code", "place", "count", value=value)))

    def counts(self) -> Any:
        """A table `value`, `count` of the elements."""
        return self.elements.group_by("value").aggregate(count=self.elements["count"].sum().cast("int64"))

    def add_code(self, table: Any, name: str) -> Any:
        """`table` with the number of the list whose text is in the column "NAME id": 0 for a null, else 1 + code."""
        own = self.codes.select(**{f"{name} value": self.codes.value, f"{name} code": self.codes.code})
        table = table.left_join(own, table[f"{name} id"] == own[f"{name} value"])
        number = (table[f"{name} code"] + 1).fill_null(0).cast("int64")
        return table.mutate(**{name: number}).drop(f"{name} value", f"{name} code")

    def fetch(self, vocabulary: Any, rare_rows: int, engine: QueryEngine, *, is_sequence: bool) -> ListTable:
        """The rows of every list, by its number. A null is an empty sequence, or row 0 of a sparse feature."""
        found = engine.fetch(
            rows_of(self.elements, {"row": ("value", vocabulary, rare_rows)}, engine).select("code", "place", "row")
        )
        arrays = {name: numbers_of(found[name]) for name in found.column_names}
        order = np.lexsort([arrays["place"], arrays["code"]])
        num_lists = int(engine.fetch(self.codes.aggregate(n=self.codes.count()))["n"][0].as_py())
        missing = [] if is_sequence else [0]
        lengths = np.concatenate([[len(missing)], np.bincount(arrays["code"], minlength=num_lists)]).astype(np.int32)
        values = np.concatenate([np.array(missing, np.int64), arrays["row"][order].astype(np.int64)])
        return ListTable(starts=np.cumsum(lengths, dtype=np.int64) - lengths, lengths=lengths, values=values)


class ListColumns:
    """The list columns of a log.yaml, each counted once."""

    def __init__(self, tables: SourceTables, events: EventTable, sides: Sequence[SideTable]) -> None:
        self._tables, self._events, self._sides = tables, events, sides
        self._found: dict[tuple[ColumnOrigin, str], ValueLists] = {}

    def of(self, feature: FeatureSpec, origin: ColumnOrigin) -> ValueLists | None:
        """The lists of a sparse or sequence feature's column; None if it has one value per row."""
        separator, are_numbers = _separator_of(self._tables, feature, origin)
        if separator and (origin, separator) not in self._found:
            if is_key(self._tables, origin):
                raise self._tables.error(f"features: {feature.name!r}: {origin.column!r} is an id, expected one value")
            if origin.join is None:
                rows = self._events.rows
                values = rows.select(value=rows[self._events.raw[origin.column]], weight=ibis.literal(1))
            else:
                rows = self._sides[origin.join].rows
                values = rows.select("code", value=rows[f"column {origin.column}"], weight=rows["count"]).distinct()
                values = values.select("value", "weight")
            found = ValueLists.of(values, separator, self._tables.engine, are_numbers=are_numbers)
            self._found[origin, separator] = found
        return self._found[origin, separator] if separator else None
