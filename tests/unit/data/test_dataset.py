"""Datasets read back to rows: all, of one split, or some columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Dataset, InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_rows, read_table, row_group_ranges
from tests.raw_logs import LOG_SCHEMA, random_log, write_log


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    raw = write_log(tmp_path / "raw", random_log(200))
    return cluster_sessions(raw, out=tmp_path / "out", rows_per_group=20, rows_per_part=60, eval_fraction=0.2)


def test_splits_together_are_all_rows(dataset: Dataset) -> None:
    whole = read_table(dataset)
    assert whole.schema.equals(LOG_SCHEMA.arrow_schema())
    assert whole.num_rows == 200
    pieces = [read_table(dataset.path, split=split) for split in ("train", "test")]
    assert [*pieces[0].to_pylist(), *pieces[1].to_pylist()] == whole.to_pylist()


def test_columns_come_in_the_order_asked(dataset: Dataset) -> None:
    narrow = read_table(dataset, columns=["history", "session_id"])
    assert narrow.column_names == ["history", "session_id"]
    assert narrow.equals(read_table(dataset).select(["history", "session_id"]))


def test_single_row_groups_can_be_read(dataset: Dataset) -> None:
    part = dataset.parts[1]
    batches = list(read_rows(dataset, row_groups={part.file: [1]}))
    before = dataset.parts[0].num_rows + part.row_group_rows[0]
    found = [row for batch in batches for row in batch.to_pylist()]
    assert found == read_table(dataset).slice(before, part.row_group_rows[1]).to_pylist()


def test_unknown_splits_and_columns_are_named(dataset: Dataset) -> None:
    with pytest.raises(InputError, match="no split 'valid'; the dataset has train, test"):
        read_table(dataset, split="valid")
    with pytest.raises(InputError, match="no column 'colour'"):
        read_table(dataset, columns=["colour"])


def test_a_damaged_part_is_named(dataset: Dataset) -> None:
    victim = Path(dataset.path) / dataset.parts[0].file
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(InputError, match=victim.name):
        Dataset.load(dataset.path)
    with pytest.raises(InputError, match=victim.name):
        list(read_rows(dataset))


@pytest.mark.parametrize("layout", ["time", "session", "deduplicated"])
def test_a_range_of_sessions_or_times_reads_only_the_row_groups_that_hold_it(tmp_path: Path, layout: str) -> None:
    raw = write_log(tmp_path / "raw", random_log(300))
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout=layout, rows_per_group=20, rows_per_part=100)
    whole = read_table(dataset).to_pylist()
    sessions, times = sorted({row["session_id"] for row in whole}), sorted({row["timestamp"] for row in whole})
    wanted = {"sessions": (sessions[10], sessions[14]), "times": (times[50], times[200])}
    for chosen in ({"sessions"}, {"times"}, {"sessions", "times"}):
        limits = {name: wanted[name] for name in chosen}
        found = [row for batch in read_rows(dataset, **limits) for row in batch.to_pylist()]
        low, high = limits.get("sessions", (sessions[0], sessions[-1]))
        first, last = limits.get("times", (times[0], times[-1]))
        expected = [row for row in whole if low <= row["session_id"] <= high and first <= row["timestamp"] <= last]
        assert found == expected
        assert found
    key, limit = ("timestamp", "times") if layout == "time" else ("session_id", "sessions")
    damage_row_groups(
        dataset, keep=lambda ranges: ranges[key][0] <= wanted[limit][1] and ranges[key][1] >= wanted[limit][0]
    )
    found = [row for batch in read_rows(dataset, **{limit: wanted[limit]}) for row in batch.to_pylist()]
    assert found == [row for row in whole if wanted[limit][0] <= row[key] <= wanted[limit][1]]
    with pytest.raises(InputError):
        list(read_rows(dataset))


def damage_row_groups(dataset: Dataset, *, keep: Callable[[dict[str, tuple[int, int]]], bool]) -> None:
    """Overwrite all row groups but those to keep: whoever reads one fails."""
    for part in dataset.parts:
        path = Path(dataset.path) / part.file
        content, footer = bytearray(path.read_bytes()), pq.read_metadata(path)
        for number, ranges in enumerate(row_group_ranges(dataset, part)):
            if not keep(ranges):
                for leaf in range(footer.num_columns):
                    chunk = footer.row_group(number).column(leaf)
                    start = chunk.dictionary_page_offset or chunk.data_page_offset
                    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(content)


def test_a_range_that_nothing_lies_in_gives_nothing(dataset: Dataset) -> None:
    assert list(read_rows(dataset, times=(10**15, 10**16))) == []
