"""One plan decides on deduplication, layout, rows and ingestion, and tells why."""

import dataclasses

import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.sources import synthetic_config
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.dedup import choose_features
from recmill.planning.planner import Topology, plan_shards
from recmill.planning.tiers.reads import load_reads
from recmill.profiling.access import profile_access

SLOW_NETWORK = Topology(nodes=2, ranks_per_node=1, inter_node_bytes_per_s=1e7)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """The same log of long sessions profiled in time order and with sessions together."""
    folder = tmp_path_factory.mktemp("log")
    raw = generate_log(synthetic_config("recd", sessions=120), out=folder / "raw")
    return {
        layout: profile_access(cluster_sessions(raw, out=folder / layout, layout=layout), out=folder / f"p-{layout}")
        for layout in ("time", "session")
    }


@pytest.fixture(scope="module")
def plans(profiles, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    options = {"topology": SLOW_NETWORK, "memory_budget_bytes": 10**9, "batch_size": 512, "cores": 10}
    return {layout: plan_shards(profile, out=folder / layout, **options) for layout, profile in profiles.items()}


def test_user_lists_and_histories_are_deduplicated_and_single_items_are_not(plans):
    features = plans["session"].dedup.features
    chosen = {name for name, entry in features.items() if entry.is_deduplicated}
    assert chosen >= {"history_0", "history_1", "user_list_0", "user_list_11"}
    assert not any(name.startswith("item_") for name in chosen)
    assert features["history_0"].id_factor > 2 * features["history_0"].factor  # windows of one sequence


def test_data_in_time_order_is_told_to_be_stored_deduplicated(plans):
    dedup = plans["time"].dedup
    assert dedup.layout == "deduplicated"
    assert max(entry.factor for name, entry in dedup.features.items() if name.startswith("user_list")) < max(
        entry.session_factor for entry in dedup.features.values()
    )


def test_distinct_lists_make_keeping_a_pooled_table_whole_cheaper(profiles, tmp_path):
    from recmill.data.schema import Schema

    profile = profiles["session"]
    schema = Schema.load(profile.path)
    factor = choose_features(profile, schema, batch_size=512)["user_list_0"].factor
    reads = {t.name: t for t in load_reads(profile, schema, batch_size=512, world_size=2)}["user_list_0"]
    assert reads.bags_per_rank == pytest.approx(256 / factor)
    assert reads.bag_ids_per_rank == pytest.approx(reads.ids_per_rank / factor)


def test_a_table_of_torchrecs_is_predicted_to_send_its_distinct_lists_only(profiles, tmp_path):
    options = {"topology": SLOW_NETWORK, "memory_budget_bytes": 10**9, "batch_size": 512, "strategy": "torchrec"}
    plan = plan_shards(profiles["session"], out=tmp_path / "plan", **options)
    entry, (tier,) = plan.dedup.features["user_list_0"], plan.tables["user_list_0"].tiers
    lists = 512 / entry.factor
    sent = lists * entry.mean_length * 8 + 2 * lists * 32 * 4  # ids there; vectors back, gradients there
    assert tier.predicted_bytes_per_step == pytest.approx(sent / 2)  # half of the lists are at home


def test_ingestion_starts_with_most_workers_where_most_time_goes(plans):
    ingest = plans["session"].ingest
    assert ingest.workers == {"read": 1, "decode": 8, "transform": 1, "batch": 1}
    assert "10 cores" in ingest.why


def test_the_reasoning_names_every_decision_with_its_figures(plans):
    told = plans["session"].why
    kinds = [text.split(":")[0] for text in told]
    assert kinds == ["Data", "Memory", "Rows", "Hot batches", "Shared parameters", "Ingestion", "Prediction"]
    assert "up to" in told[0]
    assert "ms" in told[-1]


def test_a_schema_of_single_samples_is_left_in_time_order(tmp_path):
    config = dataclasses.replace(synthetic_config("tiny", sessions=200), samples_per_session=1.0)
    raw = generate_log(config, out=tmp_path / "raw")
    profile = profile_access(cluster_sessions(raw, out=tmp_path / "data"), out=tmp_path / "profile")
    plan = plan_shards(profile, out=tmp_path / "plan", topology=Topology.local(2), memory_budget_bytes=10**9)
    assert plan.dedup.layout in ("time", "session")
    assert not any(entry.is_deduplicated for entry in plan.dedup.features.values())
