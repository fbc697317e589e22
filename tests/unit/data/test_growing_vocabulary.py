"""The rows of a vocabulary under random appends, against their definition."""

from __future__ import annotations

from collections import Counter

import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from recmill.data.preparation.spec import parse_duration
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary, VocabularyMap, hash_value
from tests.unit.data.preparation.test_prepared_log import FEW
from tests.unit.data.test_vocabulary import DAY_S, prepare

DAYS = st.lists(
    st.tuples(st.integers(1, 3), st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=14)),
    min_size=2,
    max_size=4,
)


@FEW
@given(
    days=DAYS,
    min_count=st.integers(1, 3),
    rare_rows=st.sampled_from([0, 0, 1, 3]),
    retire_after=st.sampled_from(["", "1d", "2d"]),
)
def test_values_keep_their_rows_until_they_are_retired(days, min_count, rare_rows, retire_after, tmp_path_factory):
    """New values take the rows of retired ones, then those after the last; tables never shrink."""
    folder = tmp_path_factory.mktemp("days")
    rows = f"{{min_count: {min_count}, rare_rows: {rare_rows}, retire_after: '{retire_after}'}}"
    own: dict[str, int] = {}  # rows of values that have one
    seen: dict[str, int] = {}  # when each value was last in a log, also rare ones
    num_rows, day, before = 1 + rare_rows, 0, None
    for later, items in days:
        day += later
        prepare(folder, day, items, rows=rows, before=before)
        counts, now = Counter(items), (day * DAY_S + 60 * (len(items) - 1)) * 1_000
        seen |= dict.fromkeys(counts, now)
        if retire_after and before is not None:
            seen = {value: time for value, time in seen.items() if time >= now - parse_duration(retire_after)}
        kept = {value: row for value, row in own.items() if value in seen}
        new = [value for value in counts if counts[value] >= min_count and value not in kept]
        free = sorted(set(range(1 + rare_rows, num_rows)) - set(kept.values())) if retire_after else []
        places = [*free, *range(num_rows, num_rows + len(new))]
        added = dict(zip(sorted(new, key=lambda value: (-counts[value], value)), places, strict=False))
        reused = len(added.keys()) and sum(row < num_rows for row in added.values())
        num_rows = max([num_rows, *(row + 1 for row in added.values())])
        num_retired, own = len(own) - len(kept), kept | added

        written = pq.read_table(folder / f"day{day}/vocabulary/item.parquet").to_pylist()
        assert {row["value"]: row["row"] for row in written if row["row"]} == own
        assert {row["value"]: row["last_seen"] for row in written} == seen
        assert {row["value"]: row["count"] for row in written if row["count"]} == counts
        assert Schema.load(folder / f"day{day}").feature("item").num_rows == num_rows
        table = VocabularyMap.load(folder / f"day{day}").tables["item"]
        assert (table.num_new, table.num_reused, table.num_retired) == (len(added), reused, num_retired)

        def row_of(value, own=own):
            return own.get(value) or (hash_value(value, rare_rows + 1) if rare_rows else 0)

        log = pq.read_table(next((folder / f"day{day}").glob("log-*.parquet"))).sort_by("timestamp").to_pylist()
        assert [row["item"] for row in log] == [[row_of(value)] for value in items]
        asked = [*"abcdefghij", "never seen"]
        assert Vocabulary.load(folder / f"day{day}", "item").rows(asked).tolist() == [row_of(value) for value in asked]
        before = day
