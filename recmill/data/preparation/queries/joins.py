"""Side tables: attributes by key, joined to the codes of the keys that occur in the events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recmill.data.preparation.queries.tables import SourceTables, as_text
from recmill.data.preparation.spec import FeatureSpec


@dataclass(frozen=True, kw_only=True)
class SideTable:
    """`rows` has `code`, `count` (events of the key), if it changes `valid_from`, and "column NAME" for each NAME."""

    rows: Any
    tables: SourceTables
    place: str

    def value_of(self, column: str, feature: FeatureSpec) -> Any:
        is_dense = feature.kind_or_default == "dense"
        return self.number_of(column) if is_dense else self.tables.id_of(self.rows, f"column {column}", feature.name)

    def number_of(self, column: str) -> Any:
        return self.rows[f"column {column}"]

    def counts_of(self, column: str) -> Any:
        """A table `value`, `count`: each value counts the events of the keys that have it (or had it once)."""
        value = self.tables.id_of(self.rows, f"column {column}", self.place)
        found = self.rows.select(code=self.rows.code, count=self.rows["count"], value=value).distinct()
        return found.group_by("value").aggregate(count=found["count"].sum().cast("int64"))


def join_side(tables: SourceTables, number: int, keys: Any, columns: Iterable[str]) -> SideTable:
    """The side table of a join with these columns, checked: keys are unique, and some occur in the events."""
    spec, engine, place = tables.spec, tables.engine, f"joins[{number}]"
    join = spec.joins[number]
    source, path = spec.sources[join.source], tables.files[join.source].path
    wanted = {source.key: f"sources.{join.source}.key"}
    if source.valid_from:
        wanted[source.valid_from.column] = f"sources.{join.source}.valid_from.column"
    tables.check(join.source, wanted)
    side = tables.side(join)
    key = tables.id_of(side, source.key, wanted[source.key])
    chosen = {"join key": key, **{f"column {name}": as_text(side[name]) for name in columns}}
    if source.valid_from:
        chosen["valid_from"] = tables.time_of(side, source.valid_from, f"sources.{join.source}.valid_from")
    side = side.select(**chosen)
    side = side.filter(side["join key"].notnull())
    unique = ["join key", *(["valid_from"] if source.valid_from else [])]
    repeated = side.group_by(unique).aggregate(number=side.count())
    repeated = repeated.filter(repeated.number > 1)
    found = engine.fetch(repeated.aggregate(n=repeated.count(), example=repeated["join key"].min()))
    if found["n"][0].as_py():
        what = f"{source.key!r} and {source.valid_from.column!r}" if source.valid_from else repr(source.key)
        raise tables.error(
            f"sources.{join.source}: {found['n'][0].as_py():,} values of {what} occur more than once in {path}, for "
            f"example {found['example'][0].as_py()!r}; expected one row each"
        )
    value, key = keys.value, side["join key"]
    if value.type() != key.type():
        value, key = value.cast("string"), key.cast("string")
    joined = keys.select("code", "count", "value").inner_join(side, value == key).drop("join key", "value")
    joined = engine.keep(joined)
    if not engine.fetch(joined.aggregate(n=joined.count()))["n"][0].as_py():
        mine = engine.fetch(keys.aggregate(example=keys.value.min()))["example"][0].as_py()
        other = engine.fetch(side.aggregate(example=side["join key"].min()))["example"][0].as_py()
        raise tables.error(
            f"{place}: no value of {join.column!r} (such as {mine!r}) is in column {source.key!r} of {path} (such as "
            f"{other!r})"
        )
    return SideTable(rows=joined, tables=tables, place=place)
