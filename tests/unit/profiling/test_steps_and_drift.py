"""What a step reads, and whether popularity moves with time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.schema import Feature, Schema
from recmill.profiling.access import profile_access
from recmill.profiling.counting import RowCounter
from recmill.profiling.steps import NUM_LANES, choose_pieces
from tests.raw_logs import random_log, write_log

ITEMS = Schema(features=(Feature(name="item", kind="sparse", num_rows=1_000, dim=4),))


def item_log(items: np.ndarray) -> pa.Table:
    rows = np.arange(len(items))
    return pa.table(
        {"session_id": rows // 4, "timestamp": rows, "label": np.zeros(len(rows), np.float32), "item": items}
    )


@pytest.mark.parametrize("layout", ["session", "deduplicated"])
def test_distinct_ids_of_a_step_are_those_of_batches_made_of_lanes(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.profiling.access.BATCH_SIZES", (64, 4096))
    raw = write_log(tmp_path / "raw", random_log(640))
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, rows_per_group=64)
    found = profile_access(data, out=tmp_path / "profile").tables["items"]
    rows = read_table(data).to_pylist()
    # Four batches: of each of 8 lanes of 80 rows, 8 rows from the start, a quarter, half and three quarters of it.
    batches = [[rows[80 * lane + 20 * batch + k] for lane in range(8) for k in range(8)] for batch in range(4)]
    read = [[own for row in batch for own in (*row["item"], *row["history"])] for batch in batches]
    assert found.distinct_per_step == {64: pytest.approx(np.mean([len(set(ids)) for ids in read]))}
    assert found.accesses_per_step == {64: pytest.approx(np.mean([len(ids) for ids in read]))}


@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_pieces_of_a_batch_lie_in_their_lanes_and_add_up(num_rows: int, size: int) -> None:
    if size > num_rows:
        return
    pieces = choose_pieces(num_rows, [size])
    assert len(pieces) <= 4 * NUM_LANES
    for batch in {batch for _, batch, _, _ in pieces}:
        own = [(start, stop) for _, b, start, stop in pieces if b == batch]
        assert all(0 <= start < stop <= num_rows for start, stop in own)
        assert sum(stop - start for start, stop in own) == size


def test_popularity_that_moves_is_seen_and_chance_is_told_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, 1_001)
    still = rng.choice(1_000, 8_000, p=weights / weights.sum())
    moved = np.where(np.arange(8_000) < 4_000, still, (still + 500) % 1_000)
    drifts = []
    for name, items in (("still", still), ("moved", moved)):
        raw = write_log(tmp_path / name, item_log(items), schema=ITEMS)
        data = cluster_sessions(raw, out=tmp_path / f"{name}-data", rows_per_group=512)
        drifts.append(profile_access(data, out=tmp_path / f"{name}-profile").tables["item"].drift)
    for drift in drifts:
        assert drift.num_earlier + drift.num_later == 8_000
        assert abs(drift.num_earlier - 4_000) < 500
    assert drifts[0].top_share["0.01"].lost < 0.05
    assert drifts[1].top_share["0.01"].lost > 0.9
    for figures in drifts[0].top_share.values():
        assert figures.lost == pytest.approx(figures.lost_by_chance, abs=0.05)


def test_a_sample_has_no_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recmill.profiling.access.BATCH_SIZES", (64,))
    raw = write_log(tmp_path / "raw", random_log(640))
    data = cluster_sessions(raw, out=tmp_path / "data", rows_per_group=64)
    tables = profile_access(data, out=tmp_path / "profile", sample=0.5).tables
    assert tables["items"].drift is None
    assert tables["items"].distinct_per_step[64] <= 20


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_ranks_go_by_count_then_by_row(counts: list[int]) -> None:
    counter = RowCounter(len(counts))
    counter.counts[:] = counts
    found = [pair for rows, own in counter.ranked() for pair in zip(rows.tolist(), own.tolist(), strict=True)]
    assert found == sorted(((r, n) for r, n in enumerate(counts) if n), key=lambda pair: (-pair[1], pair[0]))


def test_counts_too_large_to_pack_are_ranked_too() -> None:
    counter = RowCounter(3)
    counter.counts[:] = [5, 2**62, 7]
    ((rows, counts),) = counter.ranked()
    assert rows.tolist() == [1, 2, 0]
    assert counts.tolist() == [2**62, 7, 5]
