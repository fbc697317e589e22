"""Memory for hot rows that nobody stated: within what is left, and the size that is predicted to gain most."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.artifacts import AccessProfile
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Schema
from recmill.data.sources import synthetic_config
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.hot.budget import candidate_budgets
from recmill.planning.planner import Topology, plan_shards, table_bytes
from recmill.profiling.access import profile_access

SLOW = Topology(nodes=2, ranks_per_node=1, inter_node_bytes_per_s=2e7)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> AccessProfile:
    folder: Path = tmp_path_factory.mktemp("budget")
    raw = generate_log(synthetic_config("tiny", sessions=400, zipf=1.4), out=folder / "raw")
    return profile_access(cluster_sessions(raw, out=folder / "data"), out=folder / "profile")


def test_budgets_are_shares_of_the_tables_that_fit(profile: AccessProfile) -> None:
    tables = Schema.load(profile.path).tables
    whole = sum(map(table_bytes, tables))
    assert candidate_budgets(tables, left_bytes=10**9) == [whole // 64, whole // 16, whole // 4, whole]
    assert candidate_budgets(tables, left_bytes=whole // 10) == [whole // 64, whole // 16, whole // 10]
    assert candidate_budgets(tables, left_bytes=3) == []


def test_auto_takes_the_size_with_the_highest_predicted_gain(profile: AccessProfile, tmp_path: Path) -> None:
    options = {"topology": SLOW, "memory_budget_bytes": 2**26, "batch_size": 512, "strategy": "torchrec", "cores": 1}
    chosen = plan_shards(profile, out=tmp_path / "auto", hot_budget_bytes="auto", **options).hot_set
    assert chosen is not None
    for budget in candidate_budgets(Schema.load(profile.path).tables, left_bytes=2**25):
        fixed = plan_shards(profile, out=tmp_path / str(budget), hot_budget_bytes=budget, **options).hot_set
        assert fixed is not None
        assert fixed.expected_speed_up <= chosen.expected_speed_up


def test_a_full_memory_budget_leaves_no_hot_set(profile: AccessProfile, tmp_path: Path) -> None:
    whole = sum(map(table_bytes, Schema.load(profile.path).tables))
    plan = plan_shards(
        profile,
        out=tmp_path / "plan",
        hot_budget_bytes="auto",
        topology=Topology.local(1),
        memory_budget_bytes=whole,
        cores=1,
    )
    assert plan.hot_set is None
