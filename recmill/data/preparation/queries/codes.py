"""Numbers for ids: a code per distinct user, item and join key, and a row per value of an embedding table.

Codes follow the order of the values, and rows of a vocabulary the order of their counts, so that every engine gives
the same. A previous vocabulary keeps its rows; new values are appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ibis

from recmill.artifacts import InputError
from recmill.data.preparation.queries.tables import QueryEngine
from recmill.data.preparation.spec import RowsSpec

HASH_DIGITS = 15  # hexadecimal digits of the MD5 sum: they fit int64


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
    counted: Any, rows: RowsSpec, engine: QueryEngine, *, previous: Any = None, last_row: int = 0
) -> Any:
    """A table `value`, `row`, `count`: row 0 for values below the minimum count, else one row per value.

    `previous` is a vocabulary whose values keep their rows, up to `last_row`; new values follow.
    """
    if previous is None:
        known = counted.mutate(known_row=ibis.literal(0, "int64"))
    else:
        old = previous.select(old_value=previous.value, old_row=previous.row)
        both = counted.outer_join(old, counted.value == old.old_value)
        known = both.select(
            value=ibis.coalesce(both.value, both.old_value),
            count=both["count"].fill_null(0),
            known_row=both.old_row.fill_null(0),
        )
    known = known.mutate(is_new=(known.known_row == 0) & (known["count"] >= rows.min_count))
    order = ibis.window(order_by=[known.is_new.desc(), known["count"].desc(), known.value])
    number = ibis.row_number().over(order) + 1 + last_row
    row = ibis.cases((known.is_new, number), else_=known.known_row).cast("int64")
    found = known.mutate(row=row).select("value", "row", "count")
    return engine.keep(found)


def rows_of(table: Any, values: Mapping[str, tuple[Any, Any]], engine: QueryEngine) -> Any:
    """`table` with a column of rows per name in `values`: (its column of values, a vocabulary or a number of rows)."""
    for name, (column, vocabulary) in values.items():
        if isinstance(vocabulary, int):
            table = table.mutate(**{name: hashed_row(table[column], vocabulary, engine)})
            continue
        own = vocabulary.filter(vocabulary.row > 0)
        own = own.select(**{f"{name} value": own.value, f"{name} row": own.row})
        value = table[column]
        if value.type() != own[f"{name} value"].type():
            value = value.cast("string")
        table = table.left_join(own, value == own[f"{name} value"])
        table = table.mutate(**{name: table[f"{name} row"].fill_null(0)}).drop(f"{name} value", f"{name} row")
    return table


def hashed_row(value: Any, num_rows: int, engine: QueryEngine) -> Any:
    """1 + the first digits of the MD5 sum of the value as text, modulo `num_rows` - 1; row 0 is for nulls."""
    digits = value.cast("string").hexdigest("md5").substr(0, HASH_DIGITS)
    return (engine.hex_number(digits) % (num_rows - 1) + 1).fill_null(0).cast("int64")


def check_previous(previous: Any, counted: Any, path: str) -> None:
    if str(previous.value.type()) != str(counted.value.type()):
        raise InputError(
            f"{path}: its values are {previous.value.type()}, expected {counted.value.type()}, as in the data"
        )
