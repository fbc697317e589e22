"""What result.json says about each switch: on or off, who decided, and one sentence with a number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recmill.artifacts import Dataset, ShardPlan
from recmill.data.cluster import cluster_sessions
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.decisions import decisions_of
from recmill.training.switches import Switch

SLOW = dict.fromkeys(("intra_node_bytes_per_s", "inter_node_bytes_per_s"), 1e6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, ShardPlan, ShardPlan]:
    """A dataset, and plans of it for one and for two processes."""
    folder: Path = tmp_path_factory.mktemp("decisions")
    raw = generate_log(replace(tiny(), num_sessions=150, zipf=1.3), out=folder / "raw")
    data = cluster_sessions(raw, out=folder / "data", layout="session", eval_fraction=0.2)
    profile = profile_access(data, out=folder / "profile")
    one = plan_shards(profile, out=folder / "one", topology=Topology.local(1), memory_budget_bytes=2**24, cores=1)
    topology = Topology(nodes=1, ranks_per_node=2, **SLOW)
    budgets = {"memory_budget_bytes": 2**24, "hot_budget_bytes": 2**19, "batch_size": 256}
    return data, one, plan_shards(profile, out=folder / "two", topology=topology, cores=1, **budgets)


def decided(data: Dataset, plan: ShardPlan, **settings: str) -> dict[str, dict[str, Any]]:
    found = decisions_of(
        TrainConfig(**settings),  # type: ignore[arg-type]
        plan,
        data,
        deduplicated=["liked_topics", "history"] if settings.get("dedup") != "false" else [],
        is_tuned=settings.get("tuning") != "false",
    )
    return {entry["switch"]: entry for entry in found}


def test_every_switch_has_one_decision_with_the_same_keys(made: tuple[Dataset, ShardPlan, ShardPlan]) -> None:
    data, _, plan = made
    found = decided(data, plan)
    assert list(found) == [switch.value for switch in Switch]
    for entry in found.values():
        assert set(entry) == {"switch", "setting", "is_on", "reason", "ratio", "source", "mode"}
        assert entry["setting"] == "auto"
        assert entry["reason"]


def test_the_plan_gives_the_numbers(made: tuple[Dataset, ShardPlan, ShardPlan]) -> None:
    data, _, plan = made
    found = decided(data, plan)
    assert plan.dedup is not None
    assert plan.prediction is not None
    assert plan.hot_set is not None
    factor = max(plan.dedup.features[name].factor for name in ("liked_topics", "history"))
    assert found["dedup"]["reason"] == f"the lists of 2 features repeat inside a batch, up to {factor:.1f} times"
    assert f"{plan.prediction.seconds * 1e3:.2f} instead of" in found["tiers"]["reason"]
    assert found["tiers"]["is_on"]
    assert (found["hot_batches"]["is_on"], found["hot_batches"]["reason"]) == (plan.hot_set.pays, plan.hot_set.reason)
    assert not found["sharing"]["is_on"]


def test_one_process_has_nothing_to_exchange(made: tuple[Dataset, ShardPlan, ShardPlan]) -> None:
    data, plan, _ = made
    found = decided(data, plan)
    assert not found["tiers"]["is_on"]
    assert found["tiers"]["reason"] == "one process holds every table, so no row travels"


def test_a_setting_of_false_is_the_reason(made: tuple[Dataset, ShardPlan, ShardPlan]) -> None:
    data, _, plan = made
    for entry in decided(data, plan, **dict.fromkeys(Switch, "false")).values():
        assert (entry["is_on"], entry["source"]) == (False, "setting")
        assert entry["reason"] == "turned off by the setting"
