"""Sessions of one user share one history in a part, and read back as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import load_encoding, read_table
from recmill.data.ingest import split_groups
from recmill.data.ingest.reader import RowGroupReader
from recmill.data.schema import Feature, Schema
from recmill.data.storage import sequences as sequence_store
from recmill.data.storage.sequences import SequenceWriter, load_sequences, places_of
from tests.raw_logs import lists_of, write_log

SCHEMA = Schema(
    features=(
        Feature(name="user", kind="sparse", num_rows=1_000, dim=4, group="context"),
        Feature(name="history", kind="sequence", table="items", num_rows=5_000, dim=4, shift=True),
        Feature(name="item", kind="sparse", table="items", num_rows=5_000, dim=4),
    )
)


def clicks(
    *, num_users: int = 40, sessions_per_user: int = 12, clicks_per_session: int = 3, length: int = 20
) -> pa.Table:
    """Every user comes back, and their history goes on where their last session left it."""
    rng = np.random.default_rng(0)
    rows: dict[str, list] = {name: [] for name in ("session_id", "timestamp", "label", "user", "history", "item")}
    pasts: list[list[int]] = [[] for _ in range(num_users)]
    for number in range(num_users * sessions_per_user):
        user = int(rng.integers(num_users))
        for position in range(clicks_per_session):
            item = int(rng.integers(5_000))
            values = (number, 100 * number + position, 1.0, [user], pasts[user][-length:], [item])
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
            pasts[user].append(item)
    return pa.table({k: lists_of(v) if isinstance(v[0], list) else np.array(v) for k, v in rows.items()})


def test_sessions_of_a_user_point_into_one_sequence() -> None:
    store = SequenceWriter()
    keys, values = np.array([7, 8, 7, 7]), np.array([1, 2, 3, 2, 3, 2, 3, 4, 9])
    assert store.lay(keys, values, np.array([3, 2, 3, 1])).tolist() == [0, 0, 1, 4]
    found = load_sequences(store.dump("history", None), "history", None)
    assert found.keys.tolist() == [7, 8]
    assert found.values.tolist() == [1, 2, 3, 4, 9, 2, 3]
    assert found.begins(np.array([8, 7])).tolist() == [5, 0]


def test_users_are_places_in_the_order_of_their_first_appearance() -> None:
    store = SequenceWriter()
    first, second = np.array([7, 3, 7, 9]), np.array([3, 5, 9, 5])
    codes = store.place(first), store.place(second)
    assert [own.tolist() for own in codes] == [[0, 0, 0, 2, 0], [3, 2, 0, 2, 1]]
    found = load_sequences(store.dump("history", None), "history", None)
    assert [found.keys[places_of(own)].tolist() for own in codes] == [first.tolist(), second.tolist()]


def test_the_next_click_follows_a_session() -> None:
    store = SequenceWriter()
    keys, sizes = np.array([7, 7]), np.array([2, 3])
    begins = store.lay(keys, np.array([1, 2, 1, 2, 3]), sizes, tails={0: 3, 1: 4})
    assert begins.tolist() == [0, 0]  # the second history takes in the first one's tail
    ids, is_there = store.following(np.array([7, 7, 7]), np.array([2, 3, 4]))
    assert is_there.tolist() == [True, True, False]
    assert ids[:2].tolist() == [3, 4]


def test_ids_are_compared_whole() -> None:
    store = SequenceWriter()
    store.lay(np.array([0]), np.array([1 << 8, 5]), np.array([2]))  # its bytes hold those of 1, one further on
    assert store.lay(np.array([0]), np.array([1, 5]), np.array([2])).tolist() == [2]


@pytest.mark.parametrize("rows_per_part", [400, 1_000_000])
def test_histories_are_shared_where_users_come_back(tmp_path: Path, rows_per_part: int) -> None:
    raw = write_log(tmp_path / "raw", clicks(), schema=SCHEMA)
    options = {"rows_per_group": 200, "rows_per_part": rows_per_part, "eval_fraction": 0.1}
    session, shared = (
        cluster_sessions(raw, out=tmp_path / layout, layout=layout, **options) for layout in ("session", "deduplicated")
    )
    assert load_encoding(shared).features["history"].shared_by == "user"
    assert load_encoding(shared).features["item"].follows == "history"
    assert load_encoding(shared).features["user"].shared_by == ""
    for split in session.splits:
        assert read_table(shared, split=split).equals(read_table(session, split=split))
    assert read_table(shared, columns=["history"]).equals(read_table(session, columns=["history"]))


@pytest.mark.parametrize("names", [["history"], ["item"]])
def test_a_feature_is_read_without_those_that_it_is_stored_with(tmp_path: Path, names: list[str]) -> None:
    raw = write_log(tmp_path / "raw", clicks(), schema=SCHEMA)
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout="deduplicated", rows_per_group=200)
    reader = RowGroupReader(dataset, Schema.load(dataset.path), only=names)
    found = []
    for group in split_groups(dataset, "all"):
        block = reader.transform(group, reader.decode(group, reader.read(group)))
        batch = reader.assemble([(block, 0, len(block))], num_global=len(block))
        found += [own.tolist() for own in batch.ids[names[0]].to_dense()]
    assert found == read_table(dataset).column(names[0]).to_pylist()


def test_a_part_ends_when_its_sequences_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_log(tmp_path / "raw", clicks(), schema=SCHEMA)
    monkeypatch.setattr("recmill.data.memory_plan.MAX_SHARED_IDS", 300)
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout="deduplicated", rows_per_group=200)
    assert len(dataset.parts) > 2
    session = cluster_sessions(raw, out=tmp_path / "session", rows_per_group=200)
    assert read_table(dataset).equals(read_table(session))


def test_histories_of_users_seen_once_stay_with_their_sessions(tmp_path: Path) -> None:
    rows = clicks(num_users=30, sessions_per_user=4)
    rows = rows.set_column(3, "user", lists_of([[own] for own in rows.column("session_id").to_pylist()]))
    raw = write_log(tmp_path / "raw", rows, schema=SCHEMA)
    dataset = cluster_sessions(raw, out=tmp_path / "out", layout="deduplicated")
    assert load_encoding(dataset).features["history"].shared_by == ""
    assert read_table(dataset).equals(read_table(cluster_sessions(raw, out=tmp_path / "session")))


def test_the_search_for_an_overlap_is_bounded() -> None:
    store = SequenceWriter()
    long = np.arange(10 * sequence_store.SEARCH_IDS)
    store.lay(np.array([0]), long, np.array([len(long)]))
    assert store.lay(np.array([0]), long[:5], np.array([5])).tolist() == [len(long)]
