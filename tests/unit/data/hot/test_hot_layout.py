"""Samples that read hot rows only are laid apart, with slots for ids; nothing else changes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts import Dataset, InputError, ShardPlan, write_folder
from recmill.artifacts.plan import HotSet, HotTable, SizeEstimate
from recmill.cli import cli
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import load_encoding, read_table
from recmill.data.hot.layout import layout_hot
from recmill.data.hot.remap import MAX_ARRAY_BYTES, HotRemap, load_hot_rows
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.data.sources import make_raw_log
from recmill.planning.hot.selection import choose_hot_set
from recmill.planning.planner import Topology, default_plan
from recmill.planning.tiers.row_files import write_slots
from recmill.profiling.access import profile_access
from tests.datasets import ranking_schema, write_dataset
from tests.raw_logs import random_log, write_log

FEATURES = {"interests": "interests", "country": "country", "item": "items", "history": "items"}


def write_plan(out: Path, rows: dict[str, list[int]], schema: Schema, *, sessions: str = "split") -> ShardPlan:
    """A plan whose hot set holds the given rows."""
    hot_set = HotSet(
        budget_bytes=1,
        bytes=0,
        pays=True,
        reason="given",
        expected_speed_up=1.0,
        sessions=sessions,
        sample_share=0.5,
        session_share=0.5,
        access_share=0.5,
        interval=(0.0, 1.0),
        confidence=0.95,
        size=SizeEstimate(num_rows=1.0, low=1.0, high=1.0, confidence=0.95),
        tables={
            name: HotTable(num_rows=len(own), bytes=0, is_whole=False, lowest_count=None) for name, own in rows.items()
        },
    )
    with write_folder(out, manifest_name=ShardPlan.manifest_name) as folder:
        (folder / "hot").mkdir()
        for name, own in rows.items():
            table = pa.table({"row": np.array(own, np.int64), "slot": np.arange(len(own), dtype=np.int64)})
            pq.write_table(table, folder / "hot" / f"{name}.parquet")
        replace(default_plan(schema, Topology.local(1)), hot_set=hot_set).seal(folder)
    return ShardPlan.load(out)


HOT_ROWS = {"interests": [*range(0, 50, 2), 1], "country": [6, 0, 1, 2, 3, 4, 5], "items": list(range(39, 4, -1))}


def is_hot(row: dict) -> bool:
    return all(set(row[name]) <= set(HOT_ROWS[table]) for name, table in FEATURES.items())


def as_slots(row: dict) -> dict:
    return {**row, **{name: [HOT_ROWS[table].index(i) for i in row[name]] for name, table in FEATURES.items()}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("layout") / "data")


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> ShardPlan:
    return write_plan(tmp_path_factory.mktemp("plan") / "plan", HOT_ROWS, ranking_schema())


def test_hot_samples_hold_slots_and_all_others_stay_in_order(dataset, plan, tmp_path):
    laid = layout_hot(dataset, plan, out=tmp_path / "out")
    rows = read_table(dataset, split="train").to_pylist()
    assert read_table(laid, split="hot").to_pylist() == [as_slots(row) for row in rows if is_hot(row)]
    assert read_table(laid, split="cold").to_pylist() == [row for row in rows if not is_hot(row)]
    assert read_table(laid, split="test").equals(read_table(dataset, split="test"))
    assert laid.hot.sample_share == pytest.approx(sum(map(is_hot, rows)) / len(rows))
    assert 0 < laid.hot.num_hot < len(rows)
    Dataset.load(tmp_path / "out", verify=True)


def test_whole_sessions_are_hot_only_if_every_sample_is(dataset, plan, tmp_path):
    laid = layout_hot(dataset, plan, out=tmp_path / "out", sessions="whole")
    rows = read_table(dataset, split="train").to_pylist()
    cold = {row["session_id"] for row in rows if not is_hot(row)}
    hot = read_table(laid, split="hot").to_pylist()
    assert hot == [as_slots(row) for row in rows if row["session_id"] not in cold]
    assert not {row["session_id"] for row in hot} & set(read_table(laid, split="cold")["session_id"].to_pylist())


def test_sessions_stay_in_one_row_group(dataset, plan, tmp_path):
    laid = layout_hot(dataset, plan, out=tmp_path / "out", rows_per_group=64)
    for part in [*laid.split_parts("hot"), *laid.split_parts("cold")]:
        file = pq.ParquetFile(Path(laid.path) / part.file)
        seen: set[int] = set()
        for group in range(file.num_row_groups):
            sessions = set(file.read_row_group(group, columns=["session_id"])["session_id"].to_pylist())
            assert not sessions & seen
            seen |= sessions


def test_row_groups_that_are_nearly_full_keep_the_boundaries_of_their_source(dataset, tmp_path):
    schema = ranking_schema()
    every_row = {table.name: list(range(table.num_rows)) for table in schema.tables}
    plan = write_plan(tmp_path / "plan", every_row, schema)
    stored = [rows for part in dataset.split_parts("train") for rows in part.row_group_rows]
    assert set(stored) == {200}

    def hot_groups(rows_per_group: int | None) -> list[int]:
        laid = layout_hot(dataset, plan, out=tmp_path / "out", rows_per_group=rows_per_group)
        assert "cold" not in laid.splits
        return [rows for part in laid.split_parts("hot") for rows in part.row_group_rows]

    assert hot_groups(None) == stored  # as small as the source's, so that epochs mix samples as they did
    assert hot_groups(256) == stored  # 78% full: all samples are hot and come in the very order of the source
    assert hot_groups(300) == [400] * (len(stored) // 2)  # 67%: too small to be read alone


def test_batches_of_the_hot_split_are_all_hot_and_every_sample_comes_once(dataset, plan, tmp_path):
    laid = layout_hot(dataset, plan, out=tmp_path / "out", rows_per_group=64)
    hot = Schema.load(Path(laid.path) / "hot")
    num_samples = 0
    for split in ("hot", "cold"):
        with IngestPipeline(laid, split=split, batch_size=32) as batches:
            for batch in batches:
                num_samples += len(batch)
                for name, lists in batch.ids.to_dict().items():
                    limit = hot.feature(name).num_rows if split == "hot" else ranking_schema().feature(name).num_rows
                    assert not len(lists.values()) or int(lists.values().max()) < limit
    assert num_samples == 1600


def test_the_deduplicated_batches_of_hot_parts_are_read_too(dataset, plan, tmp_path):
    laid = layout_hot(dataset, plan, out=tmp_path / "out")
    with IngestPipeline(laid, split="hot", batch_size=64, dedup=[["interests"]], shuffle=False) as batches:
        found = torch.cat([batch.ids.to_kjt()["interests"].values() for batch in batches])
    with IngestPipeline(laid, split="hot", batch_size=64, shuffle=False) as batches:
        expected = torch.cat([batch.ids["interests"].values() for batch in batches])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["time", "session", "deduplicated"])
def test_every_layout_gives_the_same_samples(layout, tmp_path):
    raw = write_log(tmp_path / "raw", random_log(400, seed=3))
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, eval_fraction=0.2, rows_per_group=64)
    schema = Schema.load(data.path)
    rows = {"tags": [3, 1, 4, 15, 9, 2, 6, *range(10, 15)], "items": list(range(20))}
    laid = layout_hot(data, write_plan(tmp_path / "plan", rows, schema), out=tmp_path / "out")
    stored = read_table(data, split="train").to_pylist()
    chosen = [row for row in stored if set(row["tags"]) <= set(rows["tags"])]
    expected = [{**row, "tags": [rows["tags"].index(i) for i in row["tags"]]} for row in chosen]
    assert read_table(laid, split="hot").to_pylist() == expected
    assert laid.layout == layout
    assert read_table(laid, split="test").to_pylist() == read_table(data, split="test").to_pylist()


@pytest.mark.parametrize("layout", ["session", "deduplicated"])
def test_where_every_sample_is_hot_pieces_of_sessions_come_in_the_order_of_the_source(layout, tmp_path):
    raw = make_raw_log("tiny", out=tmp_path / "raw", overrides={"sessions": 100, "samples_per_session": 8})
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, eval_fraction=0.2, rows_per_group=64)
    every_row = {table.name: list(range(table.num_rows)) for table in Schema.load(raw).tables}
    laid = layout_hot(data, write_plan(tmp_path / "plan", every_row, Schema.load(raw)), out=tmp_path / "out")

    def dense_of(dataset: Dataset, split: str, limit: int) -> list[list[float]]:
        with IngestPipeline(dataset, split=split, batch_size=64, seed=3, session_limit=limit) as batches:
            return [batch.dense_BF.flatten().tolist() for batch in batches]

    assert dense_of(laid, "hot", 2) == dense_of(data, "train", 2) != dense_of(data, "train", 0)


@pytest.mark.parametrize("sessions", ["whole", "split"])
def test_a_deduplicated_dataset_stays_deduplicated_and_gives_the_batches_of_the_session_layout(sessions, tmp_path):
    raw = make_raw_log("tiny", out=tmp_path / "raw", overrides={"sessions": 400, "samples_per_session": 8})
    # All rows but one in 400 are hot, in another order than their ids.
    rows = {table.name: [row for row in range(table.num_rows)[::-1] if row % 400] for table in Schema.load(raw).tables}
    write_plan(tmp_path / "plan", rows, Schema.load(raw))

    def batches_of(layout: str) -> dict[str, list[dict]]:
        data = cluster_sessions(raw, out=tmp_path / layout, layout=layout, eval_fraction=0.2, rows_per_group=64)
        assert layout != "deduplicated" or any(own.coded for own in load_encoding(data).features.values())
        laid = layout_hot(data, tmp_path / "plan", out=tmp_path / f"{layout}-hot", sessions=sessions)
        assert laid.layout == layout
        found = {"test": read_table(laid, split="test").to_pylist()}
        for split in ("hot", "cold"):
            with IngestPipeline(laid, split=split, batch_size=32, seed=3) as batches:
                found[split] = [
                    {
                        "label": batch.label_B.tolist(),
                        "dense": batch.dense_BF.tolist(),
                        **{name: lists.values().tolist() for name, lists in batch.ids.to_dict().items()},
                    }
                    for batch in batches
                ]
        return found

    session = batches_of("session")
    assert all(session.values())
    assert batches_of("deduplicated") == session


def test_what_readers_would_hold_out_becomes_a_split(tmp_path, plan):
    data = write_dataset(tmp_path / "data", rows=(("train", 1000),))
    laid = layout_hot(data, plan, out=tmp_path / "out")
    assert set(laid.splits) == {"hot", "cold", "test"}
    assert sum(part.num_rows for part in laid.split_parts("test")) == 200  # the last row group
    assert laid.num_rows == 1000


def test_transforms_of_ids_are_applied_once(tmp_path, plan):
    schema = ranking_schema()
    steps = ({"op": "truncate", "n": 2}, {"op": "hash_to_range", "num_rows": 50, "seed": 1})
    features = tuple(replace(f, transforms=steps) if f.name == "interests" else f for f in schema.features)
    data = write_dataset(tmp_path / "data", schema=replace(schema, features=features))
    laid = layout_hot(data, plan, out=tmp_path / "out")
    assert Schema.load(laid.path).feature("interests").transforms == ()

    def batches_of(source: Dataset, split: str) -> list[int]:
        with IngestPipeline(source, split=split, batch_size=100, shuffle=False) as batches:
            return sorted(i for batch in batches for i in batch.ids["interests"].values().tolist())

    assert batches_of(laid, "test") == batches_of(data, "test")
    hot = [HOT_ROWS["interests"][slot] for slot in batches_of(laid, "hot")]
    assert sorted(hot + batches_of(laid, "cold")) == batches_of(data, "train")


def test_the_command_lays_out_and_says_what_it_found(dataset, plan, tmp_path):
    arguments = ["layout", dataset.path, "--plan", plan.path, "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["num_hot"] + found["num_cold"] == 1600
    assert found["sessions"] == "split"
    assert "hot and" in CliRunner().invoke(cli, [*arguments[:-1], "--sessions", "whole"]).output


def test_a_plan_of_choose_hot_set_serves_the_share_it_promised(dataset, tmp_path):
    profile = profile_access(dataset, out=tmp_path / "profile")
    chosen = choose_hot_set(profile, budget_bytes=2_500)
    with write_folder(tmp_path / "plan", manifest_name=ShardPlan.manifest_name) as folder:
        write_slots(folder / "hot", chosen.rows)
        replace(default_plan(ranking_schema(), Topology.local(2)), hot_set=chosen.hot_set).seal(folder)
    rows = load_hot_rows(tmp_path / "plan")
    assert {name: own.tolist() for name, own in rows.items()} == {n: o.tolist() for n, o in chosen.rows.items()}
    laid = layout_hot(dataset, tmp_path / "plan", out=tmp_path / "out", sessions="split")
    assert laid.hot.sample_share == pytest.approx(chosen.hot_set.sample_share, abs=0.08)


def test_mistakes_are_named(dataset, plan, tmp_path):
    with pytest.raises(InputError, match="sessions is 'some', expected one of whole, split"):
        layout_hot(dataset, plan, out=tmp_path / "out", sessions="some")
    laid = layout_hot(dataset, plan, out=tmp_path / "out")
    with pytest.raises(InputError, match="is laid out for hot batches already"):
        layout_hot(laid, plan, out=tmp_path / "again")
    with write_folder(tmp_path / "cold", manifest_name=ShardPlan.manifest_name) as folder:
        default_plan(ranking_schema(), Topology.local(1)).seal(folder)
    with pytest.raises(InputError, match="the plan has no hot set; plan again with --hot-budget"):
        layout_hot(dataset, tmp_path / "cold", out=tmp_path / "other")
    lacking = write_plan(tmp_path / "lacking", {"items": [1]}, ranking_schema())
    with pytest.raises(InputError, match="its hot set lacks the tables interests, country"):
        layout_hot(dataset, lacking, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


@given(
    hot=st.lists(st.integers(0, 19), unique=True, max_size=20),
    ids=st.lists(st.integers(-3, 25), max_size=30),
)
def test_arrays_and_search_find_the_same_slots(hot, ids):
    expected = [hot.index(i) if i in hot else -1 for i in ids]
    rows, wanted = np.array(hot, np.int64), np.array(ids, np.int64)
    assert HotRemap({"t": rows}, {"t": 20}).slots("t", wanted).tolist() == expected
    assert HotRemap({"t": rows}, {"t": MAX_ARRAY_BYTES}).slots("t", wanted).tolist() == expected
