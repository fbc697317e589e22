"""Clustering keeps every row, puts sessions together, and holds out whole sessions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import Dataset, InputError
from recmill.data.cluster import cluster_sessions, duckdb_engine, range_sort
from recmill.data.dataset import read_table
from recmill.data.log import RawLog
from recmill.data.memory_plan import MemoryPlan
from recmill.data.schema import Feature, Schema
from tests.raw_logs import LOG_SCHEMA, lists_of, random_log, rows_of, write_log


def session_of(rows: list[tuple]) -> list[int]:
    return [row[0] for row in rows]


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(1, 300),
    num_sessions=st.integers(1, 60),
    rows_per_group=st.integers(1, 50),
    num_files=st.integers(1, 3),
    max_time=st.sampled_from([1, 20, 10_000]),
    layout=st.sampled_from(["session", "time"]),
    seed=st.integers(0, 5),
)
def test_every_row_comes_back_in_the_order_of_the_layout(
    tmp_path_factory: pytest.TempPathFactory, num_rows, num_sessions, rows_per_group, num_files, max_time, layout, seed
) -> None:
    tmp_path = tmp_path_factory.mktemp("cluster")
    table = random_log(num_rows, num_sessions=num_sessions, max_time=max_time, seed=seed)
    raw = write_log(tmp_path / "raw", table, num_files=num_files)
    dataset = cluster_sessions(
        raw, out=tmp_path / "out", layout=layout, rows_per_group=rows_per_group, rows_per_part=max(60, rows_per_group)
    )
    rows = rows_of(read_table(dataset))
    assert Counter(rows) == Counter(rows_of(table))
    key = (lambda row: row[:2]) if layout == "session" else (lambda row: (row[1], row[0]))
    assert [key(row) for row in rows] == sorted(map(key, rows))
    assert dataset.num_sessions == len(set(session_of(rows)))
    start = 0
    for part in dataset.parts:
        footer = pq.read_metadata(tmp_path / "out" / part.file)
        found = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        assert tuple(found) == part.row_group_rows
        assert part.bytes == (tmp_path / "out" / part.file).stat().st_size
        assert part.num_sessions == len(set(session_of(rows[start : start + part.num_rows])))
        for size in found:
            group = rows[start : start + size]
            assert size <= rows_per_group or (layout == "session" and len(set(session_of(group))) == 1)
            start += size


@settings(max_examples=20, deadline=None)
@given(rows_per_group=st.integers(1, 40), seed=st.integers(0, 9), max_time=st.sampled_from([1, 10_000]))
def test_a_session_never_crosses_a_row_group(
    tmp_path_factory: pytest.TempPathFactory, rows_per_group: int, seed: int, max_time: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("cluster")
    raw = write_log(tmp_path / "raw", random_log(200, num_sessions=20, seed=seed, max_time=max_time))
    dataset = cluster_sessions(raw, out=tmp_path / "out", rows_per_group=rows_per_group, rows_per_part=50)
    seen: set[int] = set()
    for part in dataset.parts:
        file = pq.ParquetFile(tmp_path / "out" / part.file)
        for group in range(file.num_row_groups):
            sessions = set(file.read_row_group(group).column("session_id").to_pylist())
            assert not sessions & seen
            seen |= sessions


def test_the_order_depends_on_the_rows_alone(tmp_path: Path) -> None:
    """Rows of one session at one time have no order of their own: shuffled input must give the same dataset."""
    table = random_log(400, num_sessions=5, max_time=4)
    shuffled = table.take(pa.array(np.random.default_rng(1).permutation(400)))
    for layout in ("session", "time"):
        one = cluster_sessions(write_log(tmp_path / "a", table), out=tmp_path / "one", layout=layout)
        two = cluster_sessions(write_log(tmp_path / "b", shuffled), out=tmp_path / "two", layout=layout)
        assert read_table(one).equals(read_table(two))
        assert [part.row_group_rows for part in one.parts] == [part.row_group_rows for part in two.parts]


@pytest.mark.parametrize("layout", ["session", "time"])
def test_the_share_that_starts_last_is_held_out_in_whole_sessions(tmp_path: Path, layout: str) -> None:
    table = random_log(500, num_sessions=40, max_time=30)  # many sessions start at the same time
    raw = write_log(tmp_path / "raw", table)
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout=layout, eval_fraction=0.25)
    rows = sorted(rows_of(table))
    starts = {session: min(row[1] for row in group) for session, group in groupby(rows, key=lambda row: row[0])}
    last = sorted(starts, key=lambda session: (starts[session], session))[-10:]  # a quarter of 40
    assert dataset.splits == ["train", "test"]
    assert set(session_of(rows_of(read_table(dataset, split="test")))) == set(last)
    assert set(session_of(rows_of(read_table(dataset, split="train")))) == set(starts) - set(last)


def test_a_random_share_is_held_out_in_whole_sessions_the_same_in_every_layout(tmp_path: Path) -> None:
    table = random_log(2_000, num_sessions=400, max_time=300)
    raw = write_log(tmp_path / "raw", table)
    held_out = []
    for layout in ("session", "time", "deduplicated"):
        dataset = cluster_sessions(raw, out=tmp_path / layout, layout=layout, eval_fraction=0.2, eval_sessions="random")
        test, train = (set(session_of(rows_of(read_table(dataset, split=name)))) for name in ("test", "train"))
        assert test | train == set(session_of(rows_of(table)))
        assert not test & train
        held_out.append(test)
    assert held_out[0] == held_out[1] == held_out[2]
    assert 50 <= len(held_out[0]) <= 110  # about a fifth of 400
    starts = (
        read_table(cluster_sessions(raw, out=tmp_path / "all")).group_by("session_id").aggregate([("timestamp", "min")])
    )
    early = {session for session, time in zip(*starts.to_pydict().values(), strict=True) if time < 30}
    assert early & held_out[0]
    assert early - held_out[0]


def test_a_random_share_that_divides_nothing_is_refused(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(9, num_sessions=1))
    with pytest.raises(InputError, match="none or all"):
        cluster_sessions(raw, out=tmp_path / "out", eval_fraction=0.1, eval_sessions="random")


@pytest.mark.parametrize("layout", ["session", "time"])
def test_splits_of_the_schema_go_by_the_start_of_the_session(tmp_path: Path, layout: str) -> None:
    schema = Schema(features=LOG_SCHEMA.features, splits={"valid": 100, "test": 200})
    table = random_log(6).slice(0, 6)
    table = table.set_column(0, "session_id", pa.array([1, 1, 2, 3, 3, 4]))
    table = table.set_column(1, "timestamp", pa.array([99, 250, 100, 199, 300, 200]))
    raw = write_log(tmp_path / "raw", table, schema=schema)
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout=layout, eval_fraction=0.5)
    found = {split: sorted(read_table(dataset, split=split).column(0).to_pylist()) for split in dataset.splits}
    assert found == {"train": [1, 1], "valid": [2, 3, 3], "test": [4]}
    assert Schema.load(dataset.path) == schema


def test_splits_that_leave_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    schema = Schema(features=LOG_SCHEMA.features, splits={"test": -5})
    raw = write_log(tmp_path / "raw", random_log(20), schema=schema)
    with pytest.raises(InputError, match="no session starts before -5"):
        cluster_sessions(raw, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_columns_get_the_types_of_the_contract(tmp_path: Path) -> None:
    """Also when the files of one log disagree about them."""
    table = random_log(60)
    folder = write_log(tmp_path / "raw", table.slice(0, 30))
    narrow = table.slice(30)
    for name, kind in {"item": pa.list_(pa.int16()), "age": pa.float64(), "tags": pa.large_list(pa.uint8())}.items():
        column = narrow.column(name).to_pylist()
        values = pa.array([[value] for value in column] if name == "item" else column, kind)
        narrow = narrow.set_column(narrow.schema.get_field_index(name), name, values)
    pq.write_table(narrow.append_column("extra", narrow.column("age")), folder / "log-1.parquet")
    dataset = cluster_sessions(folder, out=tmp_path / "out")
    schema = pq.read_schema(Path(dataset.path) / "part-00000.parquet")
    assert schema.equals(LOG_SCHEMA.arrow_schema())
    assert Counter(rows_of(read_table(dataset))) == Counter(rows_of(table))


def test_a_sort_larger_than_its_memory_spills(tmp_path: Path) -> None:
    """104 MB of ids through a sort that may use 80 MB."""
    num_rows, length = 260_000, 50
    rng = np.random.default_rng(0)
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * length)
    ids = pa.array(rng.integers(0, 1000, num_rows * length))
    columns = {"session_id": rng.integers(0, 40_000, num_rows), "timestamp": np.arange(num_rows)}
    columns |= {"label": np.zeros(num_rows, np.float32), "ids": pa.ListArray.from_arrays(offsets, ids)}
    schema = Schema(features=(Feature(name="ids", kind="sparse", num_rows=1000, dim=4),))
    raw = write_log(tmp_path / "raw", pa.table(columns), schema=schema, row_group_size=10_000)
    dataset = cluster_sessions(raw, out=tmp_path / "out", memory_limit_bytes=100_000_000)
    rows = read_table(dataset)
    order = np.lexsort([columns["timestamp"], columns["session_id"]])
    expected = np.asarray(ids).reshape(num_rows, length)[order]
    assert (rows.column("ids").combine_chunks().values.to_numpy().reshape(num_rows, length) == expected).all()


def test_too_little_memory_is_said_in_one_sentence(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(20_000))
    with pytest.raises(InputError, match="raise --memory-limit"):
        cluster_sessions(raw, out=tmp_path / "out", memory_limit_bytes=500_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_a_rerun_replaces_and_gives_the_same_hash(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(100))
    first = cluster_sessions(raw, out=tmp_path / "out")
    again = cluster_sessions(raw, out=tmp_path / "out")
    assert first.content_hash == again.content_hash
    other = cluster_sessions(raw, out=tmp_path / "out", layout="time")
    assert Dataset.load(tmp_path / "out", verify=True).content_hash == other.content_hash != first.content_hash
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_bad_log_leaves_the_old_output_alone(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(50))
    before = cluster_sessions(raw, out=tmp_path / "out")
    table = random_log(50).set_column(4, "tags", lists_of([[1]] * 49 + [[77]]))
    with pytest.raises(InputError, match="id 77 is out of range"):
        cluster_sessions(write_log(tmp_path / "bad", table), out=tmp_path / "out")
    assert Dataset.load(tmp_path / "out", verify=True).content_hash == before.content_hash
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "out", "raw"]


def test_a_folder_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(50))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds no dataset"):
        cluster_sessions(raw, out=tmp_path / "mine")
    with pytest.raises(InputError, match="a parent of it is a file"):
        cluster_sessions(raw, out=tmp_path / "mine" / "thesis.txt" / "out")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_remote_logs_and_datasets_work(tmp_path: Path) -> None:
    table = random_log(200)
    memory = fsspec.filesystem("memory")
    memory.put(str(write_log(tmp_path / "raw", table, num_files=2)), "/cluster-test/raw", recursive=True)
    dataset = cluster_sessions("memory://cluster-test/raw", out="memory://cluster-test/out", eval_fraction=0.2)
    assert Counter(rows_of(read_table("memory://cluster-test/out"))) == Counter(rows_of(table))
    assert Dataset.load("memory://cluster-test/out", verify=True).content_hash == dataset.content_hash


def test_names_that_look_like_patterns_are_read_as_names(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "log [1]* it's", random_log(30))
    (tmp_path / "log [1]x it's").mkdir()
    pq.write_table(random_log(7), tmp_path / "log [1]x it's" / "log-0.parquet")
    assert cluster_sessions(raw, out=tmp_path / "out").num_rows == 30


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "random"},
        {"engine": "pandas"},
        {"eval_fraction": 1.0},
        {"eval_sessions": "first"},
        {"rows_per_group": 0},
    ],
)
def test_wrong_choices_are_refused(tmp_path: Path, wrong: dict) -> None:
    raw = write_log(tmp_path / "raw", random_log(5))
    with pytest.raises(InputError, match=next(iter(wrong))):
        cluster_sessions(raw, out=tmp_path / "out", **wrong)


def test_one_session_cannot_be_divided(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", random_log(9, num_sessions=1))
    with pytest.raises(InputError, match="at least 2 sessions"):
        cluster_sessions(raw, out=tmp_path / "out", eval_fraction=0.1)
    assert cluster_sessions(RawLog.open(raw), out=tmp_path / "out").num_sessions == 1


@pytest.mark.parametrize("layout", ["session", "time"])
@pytest.mark.parametrize("max_ranges", [256, 4])
def test_rows_that_do_not_fit_are_sorted_in_ranges_of_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, max_ranges: int
) -> None:
    """Ranges, and ranges that are cut once more, together are the order of one sort, split after split."""
    raw = write_log(tmp_path / "raw", random_log(900, max_time=50))
    options = {"layout": layout, "rows_per_group": 50, "eval_fraction": 0.3}
    whole = cluster_sessions(raw, out=tmp_path / "whole", **options)
    plan, spilled = MemoryPlan.of, []

    def small(*args: Any, **kwargs: Any) -> MemoryPlan:
        return replace(plan(*args, **kwargs), range_bytes=5_000, batch_rows=64)

    monkeypatch.setattr(MemoryPlan, "of", small)
    for module in (duckdb_engine, range_sort):
        monkeypatch.setattr(module, "MAX_RANGES", max_ranges)
    spill = range_sort.RangeSort._spill
    monkeypatch.setattr(range_sort.RangeSort, "_spill", lambda *args: spilled.append(found := spill(*args)) or found)
    pieces = cluster_sessions(raw, out=tmp_path / "pieces", **options)
    assert pieces.content_hash == whole.content_hash
    assert (len(spilled) > 1) == (max_ranges == 4)
    assert sum(len(found) for found in spilled) > 10
