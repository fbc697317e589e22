"""The most read rows, as a profile's counts list them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.planning.tiers.row_files import most_read_rows


@pytest.mark.parametrize("num_rows", [0, 1, 5, 10, 25])
def test_the_first_rows_of_the_counts_are_the_most_read(tmp_path, num_rows):
    counts = pa.table({"row": [7, 3, 9, 0, 1, 2, 4, 5, 6, 8], "count": list(range(10, 0, -1))})
    pq.write_table(counts, tmp_path / "t.parquet", row_group_size=4)
    assert most_read_rows(tmp_path / "t.parquet", num_rows, below=10).tolist() == counts["row"].to_pylist()[:num_rows]


def test_counts_without_rows_of_the_table_are_refused(tmp_path):
    pq.write_table(pa.table({"count": [2, 1]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t\.parquet: has no column 'row'"):
        most_read_rows(tmp_path / "t.parquet", 1, below=10)
    pq.write_table(pa.table({"row": [10, 1]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"column 'row' holds 10, expected at least 0 and less than 10"):
        most_read_rows(tmp_path / "t.parquet", 1, below=10)
    pq.write_table(pa.table({"row": [-2, 1]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"column 'row' holds -2"):
        most_read_rows(tmp_path / "t.parquet", 1, below=10)
