"""Datasets read back to rows: all, of one split, or some columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.artifacts import Dataset, InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_rows, read_table
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
