"""Profiles count what an independent query over the raw files counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import duckdb
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import AccessProfile, InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.schema import Feature, Schema
from recmill.profiling.access import profile_access
from recmill.profiling.duplication import DuplicationCounter
from recmill.profiling.sampling import ratio_half_width
from recmill.progress import no_progress
from tests.raw_logs import LOG_SCHEMA, lists_of, random_log, write_log

BATCHES = (8, 32)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_log(tmp_path / "raw", random_log(700), num_files=2)


def raw_counts(raw: Path, columns: str) -> list[tuple[int, int]]:
    query = (
        f"SELECT id, count(*) AS n FROM (SELECT {columns} AS id FROM '{raw}/*.parquet') GROUP BY id ORDER BY n DESC, id"
    )
    return duckdb.sql(query).fetchall()


def written_counts(profile: AccessProfile, table: str) -> list[tuple[int, int]]:
    counts = pq.read_table(Path(profile.path) / "counts" / f"{table}.parquet")
    assert counts.schema.equals(pa.schema([("row", pa.int64()), ("count", pa.int64())]))
    return list(zip(counts["row"].to_pylist(), counts["count"].to_pylist(), strict=True))


@pytest.mark.parametrize("layout", ["session", "time"])
@pytest.mark.parametrize("max_array_rows", [10**6, 25, 0])  # 25: only the items are counted in an array
def test_counts_equal_an_independent_count(
    raw: Path, tmp_path: Path, layout: str, max_array_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.profiling.access.MAX_ARRAY_ROWS", max_array_rows)
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, rows_per_group=64)
    profile = profile_access(data, out=tmp_path / "profile")
    # The items' table is read by two features.
    assert written_counts(profile, "tags") == raw_counts(raw, "unnest(tags)")
    assert written_counts(profile, "items") == raw_counts(raw, "unnest(list_append(history, item))")
    tags = profile.tables["tags"]
    assert tags.num_accesses == sum(n for _, n in raw_counts(raw, "unnest(tags)"))
    assert (tags.num_rows, tags.dim, tags.features) == (30, 4, ("tags",))
    assert profile.tables["items"].features == ("item", "history")
    assert profile.num_samples == 700
    assert AccessProfile.load(profile.path, verify=True).inputs == {"dataset": data.content_hash}


@pytest.mark.parametrize("layout", ["session", "time"])
def test_duplication_agrees_with_counting_row_by_row(
    raw: Path, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.profiling.duplication.BATCH_SIZES", BATCHES)
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, rows_per_group=64)
    found = profile_access(data, out=tmp_path / "profile")
    stored = read_table(data).to_pylist()
    sessions = defaultdict(list)
    by_session = read_table(cluster_sessions(raw, out=tmp_path / "sorted")).to_pylist()
    for row in by_session:
        sessions[row["session_id"]].append(row)
    assert found.num_sessions == len(sessions)
    assert found.samples_per_session == pytest.approx(700 / len(sessions))
    for name in ("age", "tags", "item", "history"):
        values = {session: [str(row[name]) for row in rows] for session, rows in sessions.items()}
        pairs = [(a, b) for rows in values.values() for a, b in pairwise(rows)]
        distinct = sum(len(set(rows)) for rows in values.values())
        figures = found.duplication[name]
        assert figures.same_as_previous == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
        assert figures.distinct_per_session == pytest.approx(distinct / len(sessions))
        assert figures.dedup_factor == pytest.approx(700 / distinct)
        for size in BATCHES:
            batches = [stored[start : start + size] for start in range(0, 700, size)]
            expected = 700 / sum(len({str(row[name]) for row in batch}) for batch in batches)
            assert figures.batch_dedup_factor[size] == pytest.approx(expected)
    lengths = [len(row["tags"]) for row in stored]
    assert found.duplication["tags"].mean_length == pytest.approx(np.mean(lengths))


def test_a_history_that_shifts_is_seen(tmp_path: Path) -> None:
    schema = Schema(features=(Feature(name="history", kind="sequence", num_rows=100, dim=4, shift=True),))
    # Session 1: grows, shifts, shifts the other way, stays. Session 2: changes altogether.
    histories = [[1, 2], [1, 2, 3], [2, 3, 4], [9, 2, 3], [9, 2, 3], [5, 6, 7], [8, 9, 10]]
    table = pa.table(
        {
            "session_id": [1, 1, 1, 1, 1, 2, 2],
            "timestamp": [0, 1, 2, 3, 4, 0, 1],
            "label": pa.array([0.0] * 7, pa.float32()),
            "history": lists_of(histories),
        }
    )
    raw = write_log(tmp_path / "raw", table, schema=schema)
    found = profile_access(cluster_sessions(raw, out=tmp_path / "data"), out=tmp_path / "profile").duplication
    assert found["history"].shifted_by_one == pytest.approx(3 / 5)
    assert found["history"].same_as_previous == pytest.approx(1 / 5)
    assert found["history"].dedup_factor == pytest.approx(7 / 6)


@pytest.mark.parametrize("batch_rows", [1, 7, 500])
def test_chunks_do_not_change_the_figures(tmp_path: Path, batch_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_log(tmp_path / "raw", random_log(500, num_sessions=11))  # sessions longer than a chunk
    rows = read_table(cluster_sessions(raw, out=tmp_path / "data"))
    whole = DuplicationCounter(LOG_SCHEMA, batch_sizes=BATCHES, counts_sessions=True)
    monkeypatch.setattr("recmill.profiling.duplication.CHUNK_ROWS", 32)
    pieces = DuplicationCounter(LOG_SCHEMA, batch_sizes=BATCHES, counts_sessions=True)
    whole.add_all(rows.to_batches(), no_progress, 500)
    pieces.add_all(rows.to_batches(max_chunksize=batch_rows), no_progress, 500)
    assert pieces.figures(pieces) == whole.figures(whole)
    assert whole.num_rows == 500


def test_only_training_rows_are_counted_where_there_are_splits(raw: Path, tmp_path: Path) -> None:
    data = cluster_sessions(raw, out=tmp_path / "data", eval_fraction=0.3)
    train = profile_access(data, out=tmp_path / "profile")
    expected = Counter(i for tags in read_table(data, split="train")["tags"].to_pylist() for i in tags)
    assert dict(written_counts(train, "tags")) == expected
    assert train.split == "train"
    test = profile_access(data, out=tmp_path / "profile", split="test")
    assert train.num_samples + test.num_samples == 700


def test_a_sample_is_seeded_and_its_interval_covers_the_truth(tmp_path: Path) -> None:
    schema = Schema(features=(Feature(name="item", kind="sparse", num_rows=2000, dim=4),))
    rng = np.random.default_rng(0)
    weights = np.arange(1, 2001) ** -1.1
    num_rows = 60_000
    columns = {"session_id": np.arange(num_rows) // 3, "timestamp": np.arange(num_rows)}
    columns |= {"label": np.zeros(num_rows, np.float32), "item": rng.choice(2000, num_rows, p=weights / weights.sum())}
    raw = write_log(tmp_path / "raw", pa.table(columns), schema=schema)
    data = cluster_sessions(raw, out=tmp_path / "data", rows_per_group=500)
    exact = profile_access(data, out=tmp_path / "exact").tables["item"]
    sampled = profile_access(data, out=tmp_path / "sampled", sample=0.3)
    again = profile_access(data, out=tmp_path / "again", sample=0.3)
    assert sampled.content_hash == again.content_hash
    assert sampled.num_samples == pytest.approx(0.3 * num_rows, rel=0.05)
    table = sampled.tables["item"]
    for share in ("0.001", "0.01", "0.1"):
        half_width = table.top_share_half_width[share]
        assert 0 < half_width < 0.1
        assert abs(table.top_share[share] - exact.top_share[share]) <= half_width + 0.01
    assert exact.top_share_half_width is None


def test_half_widths_follow_the_ratio_estimator() -> None:
    hits, totals = np.array([4.0, 6.0, 5.0]), np.array([10.0, 10.0, 10.0])
    # Equal totals: the plain interval of a mean, t(0.975, 2) * sd / sqrt(3) / 10, with sd 1.
    assert ratio_half_width(hits, totals, 0.95) == pytest.approx(4.302653 / np.sqrt(3) / 10, rel=1e-6)
    assert ratio_half_width(hits[:1], totals[:1], 0.95) is None


def test_remote_datasets_can_be_profiled(raw: Path, tmp_path: Path) -> None:
    data = cluster_sessions(raw, out="memory://profile-test/data")
    profile = profile_access("memory://profile-test/data", out="memory://profile-test/profile")
    assert profile.inputs == {"dataset": data.content_hash}
    with fsspec.open("memory://profile-test/profile/counts/tags.parquet", "rb") as file:
        assert pq.read_table(file).num_rows == profile.tables["tags"].num_distinct


@pytest.mark.parametrize("wrong", [{"sample": 0.0}, {"sample": 1.5}, {"confidence": 1.0}, {"split": "valid"}])
def test_wrong_choices_are_refused(raw: Path, tmp_path: Path, wrong: dict) -> None:
    data = cluster_sessions(raw, out=tmp_path / "data")
    with pytest.raises(InputError, match=next(iter(wrong))):
        profile_access(data, out=tmp_path / "profile", **wrong)
    assert not (tmp_path / "profile").exists()
