"""Numbers for ids: a code per distinct user, item and join key, and a row per value of an embedding table.

Codes follow the order of the values, and rows of a vocabulary the order of their counts, so that every engine gives
the same. A previous vocabulary keeps its rows; new values take the rows of retired ones, then are appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ibis

from recmill.artifacts import InputError
from recmill.data.preparation.queries.tables import QueryEngine
from recmill.data.preparation.spec import RowsSpec
from recmill.data.vocabulary import HASH_DIGITS


@dataclass(frozen=True, kw_only=True)
class MapVersion:
    """The version of the map that is being made, and when the newest event of the log happened."""

    number: int
    last_ms: int


@dataclass(frozen=True, kw_only=True)
class PreviousTable:
    """A table's vocabulary in the version before."""

    path: str
    table: Any  # value, row, count, since, last_seen
    num_rows: int
    rare_rows: int


def number_values(values: Any, engine: QueryEngine) -> Any:
    """A table `value`, `count`, `code` with a code per distinct value of `values`, a table `value` with other sums."""
    others = [name for name in values.columns if name != "value"]
    known = values.filter(values.value.notnull())
    counted = known.group_by("value").aggregate(
        count=known.count(), **{n: known[n].sum().cast("int64") for n in others}
    )
    order = ibis.window(order_by=counted.value)
    return engine.keep(counted.mutate(code=ibis.row_number().over(order).cast("int64")))


def sum_counts(counted: Sequence[Any]) -> Any:
    """One count per value from several tables `value`, `count`; mixed types become text."""
    kinds = {str(table.value.type()) for table in counted}
    if len(kinds) > 1:
        counted = [table.mutate(value=table.value.cast("string")) for table in counted]
    merged = ibis.union(*counted) if len(counted) > 1 else counted[0]
    merged = merged.filter(merged.value.notnull())
    return merged.group_by("value").aggregate(count=merged["count"].sum().cast("int64"))


def make_vocabulary(
    counted: Any, rows: RowsSpec, engine: QueryEngine, *, version: MapVersion, previous: PreviousTable | None = None
) -> Any:
    """A table `value`, `row`, `count`, `since`, `last_seen`: row 0 for rare values, else one row per value.

    Values of `previous` keep their rows, unless they are retired; new values take free rows, the first ones first,
    then those after the last.
    """
    now, seen = (ibis.literal(number, "int64") for number in (version.number, version.last_ms))
    last_row, free, num_free = rows.rare_rows, None, 0
    if previous is None:
        known = counted.mutate(known_row=ibis.literal(0, "int64"), known_since=now, last_seen=seen)
    else:
        table = previous.table
        old = table.select(old_value=table.value, old_row=table.row, old_since=table.since, old_seen=table.last_seen)
        both = counted.outer_join(old, counted.value == old.old_value)
        known = both.select(
            value=ibis.coalesce(both.value, both.old_value),
            count=both["count"].fill_null(0),
            known_row=both.old_row.fill_null(0),
            known_since=both.old_since.fill_null(version.number),
            last_seen=(both["count"].fill_null(0) > 0).ifelse(seen, both.old_seen),
        )
        last_row = previous.num_rows - 1
        if rows.retire_ms:
            known = engine.keep(known.filter(known.last_seen >= version.last_ms - rows.retire_ms))
            free = _free_rows(known, rows.rare_rows + 1, last_row + 1, engine)
            num_free = int(engine.fetch(free.aggregate(n=free.count()))["n"][0].as_py())
    known = known.mutate(is_new=(known.known_row == 0) & (known["count"] >= rows.min_count))
    order = ibis.window(order_by=[known.is_new.desc(), known["count"].desc(), known.value])
    known = known.mutate(place=ibis.row_number().over(order).cast("int64"))
    number = known.place + 1 + last_row - num_free
    if free is not None:
        known = known.left_join(free, known.place == free.free_place)
        number = ibis.coalesce(known.free_row, known.place + 1 + last_row - num_free)
    row = ibis.cases((known.is_new, number), else_=known.known_row).cast("int64")
    since = ibis.cases((known.is_new, now), else_=known.known_since).cast("int64")
    return engine.keep(known.mutate(row=row, since=since).select("value", "row", "count", "since", "last_seen"))


def _free_rows(known: Any, start: int, stop: int, engine: QueryEngine) -> Any:
    """A table `free_place`, `free_row`: the rows from `start` to `stop` that no value has, numbered from 0."""
    every = ibis.range(ibis.literal(start, "int64"), ibis.literal(stop, "int64")).unnest().name("free_row").as_table()
    unused = every.anti_join(known, every.free_row == known.known_row)
    place = ibis.row_number().over(ibis.window(order_by=unused.free_row)).cast("int64")
    return engine.keep(unused.mutate(free_place=place))


def rows_of(table: Any, values: Mapping[str, tuple[str, Any, int]], engine: QueryEngine) -> Any:
    """`table` with a column of rows per name in `values`.

    Each is its column of values, a vocabulary or a number of rows to hash to, and the rare rows of a vocabulary.
    """
    for name, (column, vocabulary, rare_rows) in values.items():
        if isinstance(vocabulary, int):
            table = table.mutate(**{name: hashed_row(table[column], vocabulary, engine)})
            continue
        own = vocabulary.filter(vocabulary.row > 0)
        own = own.select(**{f"{name} value": own.value, f"{name} row": own.row})
        value = table[column]
        if value.type() != own[f"{name} value"].type():
            value = value.cast("string")
        table = table.left_join(own, value == own[f"{name} value"])
        rest = hashed_row(table[column], rare_rows + 1, engine) if rare_rows else 0
        table = table.mutate(**{name: table[f"{name} row"].fill_null(rest)}).drop(f"{name} value", f"{name} row")
    return table


def hashed_row(value: Any, num_rows: int, engine: QueryEngine) -> Any:
    """1 + the first digits of the MD5 sum of the value as text, modulo `num_rows` - 1; row 0 is for nulls."""
    digits = value.cast("string").hexdigest("md5").substr(0, HASH_DIGITS)
    return (engine.hex_number(digits) % (num_rows - 1) + 1).fill_null(0).cast("int64")


def check_previous(previous: PreviousTable, counted: Any, rows: RowsSpec) -> None:
    found, expected = previous.table.value.type(), counted.value.type()
    if str(found) != str(expected):
        raise InputError(f"{previous.path}: its values are {found}, expected {expected}, as in the data")
    if previous.rare_rows != rows.rare_rows:
        raise InputError(
            f"{previous.path}: was made with rare_rows {previous.rare_rows}, but log.yaml says {rows.rare_rows}"
        )
