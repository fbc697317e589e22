"""Which side table joins on which column of the events: by the names, and by how many values are found there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recmill.data.inspection import naming
from recmill.data.inspection.columns import ColumnFacts, quoted
from recmill.data.inspection.naming import words
from recmill.data.inspection.reading import InspectedTable

LEAST_SHARE = 0.5  # of the events that must find their row
LEAST_NAMELESS_SHARE = 0.9  # where the names of the columns have nothing in common


@dataclass(frozen=True, kw_only=True)
class Match:
    """A side table, its key, and the column of the events that holds the key."""

    table: str
    key: str
    column: str
    share_of_events: float  # whose value is in the side table
    share_of_keys: float  # that occur in the events
    num_duplicates: int  # keys that occur more than once
    valid_from: str = ""  # the column that tells rows with the same key apart, by time
    is_alike: bool = False  # the names agree

    @property
    def points(self) -> float:
        return 3 * self.is_alike + 3 * self.share_of_events + 2 * self.share_of_keys - 2 * bool(self.num_duplicates)

    @property
    def is_clean(self) -> bool:
        return not self.num_duplicates or bool(self.valid_from)

    def describe(self) -> str:
        parts = [f"{self.share_of_events:.1%} of the events find a row", f"{self.share_of_keys:.1%} of the keys occur"]
        if self.valid_from:
            parts.append(f"keys repeat, told apart by {self.valid_from}")
        elif self.num_duplicates:
            parts.append(f"{self.num_duplicates:,} keys occur more than once")
        else:
            parts.append("keys are unique")
        return ", ".join(parts)


def match_tables(connection: Any, events: InspectedTable, others: Sequence[InspectedTable]) -> list[Match]:
    """The best match of every other table that joins the events at all, in the order of the tables."""
    matches = []
    for table in others:
        found = [
            match
            for key in table.columns
            for column in events.columns
            if _are_comparable(key, column) and (match := _measure(connection, events, table, key, column))
        ]
        if found:
            matches.append(max(found, key=lambda match: (match.points, match.column == match.key)))
    return matches


def _are_comparable(key: ColumnFacts, column: ColumnFacts) -> bool:
    """Ids of the same nature, with a key whose values rarely repeat."""
    if not key.can_be_id or not column.can_be_id or key.nature != column.nature or key.time_form or column.time_form:
        return False
    return are_alike(key, column) or key.rows_per_value < 1.5


def are_alike(key: ColumnFacts, column: ColumnFacts) -> bool:
    """product_id and product_id, or product_id and the column id of the table products."""
    if key.name.lower() == column.name.lower():
        return not key.name.startswith("column")  # names that a file without a header gets
    own, other = words(key.name), words(column.name)
    if own and own <= naming.IDENTITY:
        return bool(words(key.table) & (other - naming.IDENTITY))
    return bool((own & other) - naming.IDENTITY) and bool((own | other) & naming.IDENTITY)


def _measure(
    connection: Any, events: InspectedTable, table: InspectedTable, key: ColumnFacts, column: ColumnFacts
) -> Match | None:
    """How well the column joins the key; None if too few values are found. Keys of the whole table are compared."""
    left, right = quoted(column.name), quoted(key.name)
    query = f"""
        WITH keys AS (SELECT {right} AS k, count(*) AS n FROM {table.whole} WHERE {right} IS NOT NULL GROUP BY 1),
             used AS (SELECT {left} AS k, count(*) AS n FROM {events.view} WHERE {left} IS NOT NULL GROUP BY 1)
        SELECT (SELECT sum(n) FROM used), (SELECT sum(n) FROM used SEMI JOIN keys USING (k)),
               (SELECT count(*) FROM keys), (SELECT count(*) FROM keys SEMI JOIN used USING (k)),
               (SELECT count(*) FROM keys WHERE n > 1)
    """
    num_events, num_joined, num_keys, num_used, num_duplicates = connection.execute(query).fetchone()
    share, is_alike = (num_joined or 0) / max(1, num_events or 0), are_alike(key, column)
    if share < (LEAST_SHARE if is_alike else LEAST_NAMELESS_SHARE):
        return None
    is_time_key = num_duplicates and (times := _changing_times(connection, table, key))
    if num_duplicates > 0.02 * num_keys and not is_time_key:
        return None
    return Match(
        table=table.name,
        key=key.name,
        column=column.name,
        share_of_events=share,
        share_of_keys=num_used / max(1, num_keys),
        num_duplicates=num_duplicates,
        valid_from=times[0] if is_time_key else "",
        is_alike=is_alike,
    )


def _changing_times(connection: Any, table: InspectedTable, key: ColumnFacts) -> list[str]:
    """Columns of times that make the key unique: the row of a key that is valid from then on."""
    names = []
    for column in table.columns:
        if not column.time_form or column.num_nulls:
            continue
        pair = f"{quoted(key.name)}, {quoted(column.name)}"
        query = f"SELECT count(*) FROM (SELECT {pair} FROM {table.whole} GROUP BY {pair} HAVING count(*) > 1)"
        if connection.execute(query).fetchone()[0] == 0:
            names.append(column)
    ranked = sorted(names, key=lambda column: -len(words(column.name) & naming.BEGINNING))
    return [column.name for column in ranked]
