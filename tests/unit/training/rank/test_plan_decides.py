"""What a plan decides is what runs: each test changes one decision in plan.json and sees the run change."""

import json
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from recmill.artifacts import Dataset, ShardPlan, hash_file
from recmill.artifacts.manifest import sign_manifest
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Schema
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.rank.dedup import choose_dedup
from recmill.training.rank.holders import assign_tables
from recmill.training.rank.worker import open_run
from recmill.training.trainer import lay_out_hot, layout_note, make_job

CONFIG = TrainConfig(
    batch_size=64, max_steps=2, eval_batch_size=512, bottom_layers=(16,), top_layers=(16,), threads=1, epochs=1
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decides")
    raw = generate_log(replace(tiny(), num_sessions=150, zipf=1.3), out=folder / "raw")
    data = cluster_sessions(raw, out=folder / "data", layout="deduplicated", eval_fraction=0.2)
    cluster_sessions(raw, out=folder / "time", layout="time", eval_fraction=0.2)
    profile = profile_access(data, out=folder / "profile")
    common = {"memory_budget_bytes": 2**24, "batch_size": CONFIG.batch_size, "cores": 2}
    plan_shards(profile, out=folder / "plan", topology=Topology.local(1), hot_budget_bytes=40_000, **common)
    plan_shards(profile, out=folder / "shared", topology=Topology.local(1), compress="4", **common)
    slow = dict.fromkeys(("intra_node_latency_s", "inter_node_latency_s"), 0.0)
    links = slow | dict.fromkeys(("intra_node_bytes_per_s", "inter_node_bytes_per_s"), 1e4)
    plan_shards(profile, out=folder / "tiers", topology=Topology(nodes=1, ranks_per_node=2, **links), **common)
    return folder


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def changed(plan, out, change):
    """A copy of a plan with `change` applied to its plan.json."""
    shutil.copytree(plan, out)
    manifest = json.loads((out / "plan.json").read_text())
    change(manifest)
    (out / "plan.json").write_text(json.dumps(sign_manifest(manifest)))
    return out


def open_with(work, plan, out, config=CONFIG):
    out.mkdir(exist_ok=True)
    job = make_job(work / "data", out=out, plan=plan, allocation=None, nproc=1, config=config)
    return open_run(lay_out_hot(job, out, config, lambda *_: None), torch.device("cpu"))


def keep_only(name):
    def change(plan):
        for feature, entry in plan["dedup"]["features"].items():
            entry["is_deduplicated"] = feature == name

    return change


def test_the_plans_features_are_deduplicated(work, tmp_path, alone):
    planned = ShardPlan.load(work / "plan").dedup.features
    chosen = {name for name, found in planned.items() if found.is_deduplicated}
    run = open_with(work, work / "plan", tmp_path / "as-planned")
    assert {name for group in run.dedup.groups for name in group} == chosen
    assert {"liked_topics", "history"} <= chosen
    plan = changed(work / "plan", tmp_path / "plan", keep_only("liked_topics"))
    run = open_with(work, plan, tmp_path / "changed")
    assert run.dedup.groups == (("liked_topics",),)
    batch, _ = next(iter(run.ingest))
    run.ingest.close()
    assert [keys for g, keys in enumerate(batch.ids.groups) if not batch.ids.is_plain(g)] == [["liked_topics"]]


def test_a_feature_that_the_first_batch_does_not_repeat_is_deduplicated_if_the_plan_says_so(work, tmp_path):
    data = Dataset.load(work / "data")
    plan = ShardPlan.load(changed(work / "plan", tmp_path / "plan", keep_only("item")))
    assert choose_dedup(data, Schema.load(data.path), CONFIG, plan).groups == (("item",),)


def test_without_a_plans_choice_the_first_batch_decides(work, tmp_path):
    data, rows = Dataset.load(work / "data"), Dataset.load(work / "time")
    schema = Schema.load(data.path)
    silent = ShardPlan.load(changed(work / "plan", tmp_path / "silent", lambda plan: plan["dedup"].update(features={})))
    one = ShardPlan.load(changed(work / "plan", tmp_path / "one", keep_only("liked_topics")))
    assert choose_dedup(data, schema, CONFIG, silent) == choose_dedup(data, schema, CONFIG)
    assert choose_dedup(rows, schema, CONFIG, one) == choose_dedup(rows, schema, CONFIG), "shuffled time order"
    everything = replace(CONFIG, dedup="true")
    assert choose_dedup(data, schema, everything, one) == choose_dedup(data, schema, everything)
    assert not choose_dedup(data, schema, replace(CONFIG, dedup="false"), one).groups


def test_ingestion_starts_with_the_plans_workers(work, tmp_path, alone):
    workers = {"read": 1, "decode": 3, "transform": 2, "batch": 1}
    plan = changed(work / "plan", tmp_path / "plan", lambda plan: plan["ingest"].update(workers=workers))
    for name, path in (("before", work / "plan"), ("after", plan)):
        with open_with(work, path, tmp_path / name).ingest as feed:
            next(iter(feed))
            assert (feed.pipelines[0].workers == workers) is (name == "after")


def test_hot_batches_are_trained_if_the_plan_says_that_they_pay(work, tmp_path, alone):
    for pays in (True, False):
        plan = changed(work / "plan", tmp_path / f"plan-{pays}", lambda plan, p=pays: plan["hot_set"].update(pays=p))
        run = open_with(work, plan, tmp_path / f"run-{pays}")
        assert (run.ingest.schedule is not None) is pays
        assert bool(run.sharded.hot) is pays


def test_the_plans_hot_rows_are_the_hot_rows(work, tmp_path, alone):
    config = replace(CONFIG, hot_batches="true")
    before = open_with(work, work / "plan", tmp_path / "before", config)
    plan = tmp_path / "plan"
    shutil.copytree(work / "plan", plan)
    file = plan / "hot" / "item.parquet"
    fewer = pq.read_table(file).sort_by("slot").slice(0, 5)
    pq.write_table(fewer, file)
    manifest = json.loads((plan / "plan.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == "hot/item.parquet":
            entry |= {"bytes": file.stat().st_size, "sha256": hash_file(file)}
    (plan / "plan.json").write_text(json.dumps(sign_manifest(manifest)))
    after = open_with(work, plan, tmp_path / "after", config)
    counts = [run.ingest.schedule.num_hot if run.ingest.schedule else 0 for run in (before, after)]
    assert counts[1] < counts[0]


def test_a_table_shares_parameters_only_if_the_plan_places_it_so(work, tmp_path, alone):
    whole = json.loads((work / "plan" / "plan.json").read_text())["tables"]
    shared = json.loads((work / "shared" / "plan.json").read_text())["shared"]["tables"]
    name = sorted(shared)[0]

    def place_whole(plan):
        plan["tables"][name] = whole[name]
        del plan["shared"]["tables"][name]

    plan = changed(work / "shared", tmp_path / "plan", place_whole)
    run = open_with(work, plan, tmp_path / "run")
    held = {
        kind: set(store.array.tables)
        for store in run.sharded.stores
        if (kind := type(store).__name__).startswith("Shared")
    }
    assert list(held.values()) == [set(shared) - {name}]


def test_a_table_has_tiers_only_if_the_plan_places_it_so(work, tmp_path):
    schema, plan = Schema.load(work / "data"), ShardPlan.load(work / "tiers")
    tiered = assign_tables(schema, plan, CONFIG).tiered
    assert tiered
    name = sorted(tiered)[0]
    other = changed(work / "tiers", tmp_path / "plan", lambda plan: plan["tables"][name].update(placement="torchrec"))
    assert assign_tables(schema, ShardPlan.load(other), CONFIG).tiered == tiered - {name}


def test_data_in_another_layout_than_the_plans_is_pointed_out(work, tmp_path, alone):
    for layout in ("deduplicated", "session"):
        plan = changed(
            work / "plan", tmp_path / f"plan-{layout}", lambda plan, layout=layout: plan["dedup"].update(layout=layout)
        )
        result = open_with(work, plan, tmp_path / f"run-{layout}", replace(CONFIG, hot_batches="false")).train()
        assert result["data"]["planned_layout"] == layout
        assert bool(layout_note(result)) is (layout != "deduplicated")
