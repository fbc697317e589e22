"""Two processes try the switches: they agree, and the run that follows is the one with those switches set by hand."""

import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path

from recmill.data.cluster import cluster_sessions
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.trainer import train
from tests.integration.tried_rank import compare_on

CONFIG = TrainConfig(
    batch_size=128, max_steps=24, eval_batch_size=512, bottom_layers=(16,), top_layers=(16,), threads=1, seed=1
)
# Without latency and with slow links copies of rows pay even in small tables, so that the plan has tiers.
LINKS = {"intra_node_latency_s": 0.0, "intra_node_bytes_per_s": 1e4}


def test_ranks_that_measure_otherwise_follow_rank_zero() -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=compare_on, args=(rank, f"{folder}/store", found)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        verdicts = [found.get(timeout=120) for _ in ranks]
        for rank in ranks:
            rank.join(timeout=60)
    assert sorted(verdicts) == [(0, True), (1, True)]


def test_a_tried_run_equals_the_one_set_by_hand_and_is_tried_once(tmp_path: Path) -> None:
    raw = generate_log(replace(tiny(), num_sessions=250, zipf=1.3), out=tmp_path / "raw")
    data = cluster_sessions(raw, out=tmp_path / "data", layout="deduplicated", eval_fraction=0.2)
    plan_shards(
        profile_access(data, out=tmp_path / "profile"),
        out=tmp_path / "plan",
        topology=Topology(nodes=1, ranks_per_node=2, **LINKS),
        memory_budget_bytes=2**24,
        hot_budget_bytes=40_000,
        batch_size=CONFIG.batch_size,
    )
    shared = {"plan": tmp_path / "plan", "nproc": 2}
    tried = train(tmp_path / "data", out=tmp_path / "tried", config=CONFIG, **shared)
    decided = {entry["switch"]: entry for entry in tried["decisions"]}
    assert tried["trial_seconds"] > 0
    assert all(decided[name]["source"] == "trial" for name in ("tiers", "dedup"))
    states = {
        name: (decided[name]["mode"] or "auto") if decided[name]["is_on"] else "false"
        for name in ("dedup", "tiers", "hot_batches")
    }
    by_hand = replace(CONFIG, trial=False, **states)
    alike = train(tmp_path / "data", out=tmp_path / "hand", config=by_hand, **shared)
    assert [entry["loss"] for entry in tried["curve"]] == [entry["loss"] for entry in alike["curve"]]
    assert tried["metrics"] == alike["metrics"]
    again = train(tmp_path / "data", out=tmp_path / "again", config=replace(CONFIG, seed=2), **shared)
    assert again["trial_seconds"] == 0
    assert [entry["is_on"] for entry in again["decisions"]] == [entry["is_on"] for entry in tried["decisions"]]
