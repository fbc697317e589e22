"""Every pair of switches and all of them together train, and what is exact gives the reference's weights."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recmill.artifacts import Dataset, ShardPlan, write_folder
from recmill.artifacts.plan import TablePlan, Tier
from recmill.data.cluster import cluster_sessions
from recmill.data.hot.layout import layout_hot
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig

SWITCHES = ("dedup", "tiers", "hot_batches", "sharing", "tuning")
CONFIG = TrainConfig(
    batch_size=128,
    eval_batch_size=512,
    max_steps=8,
    bottom_layers=(16,),
    top_layers=(16,),
    threads=1,
    dedup="false",
    tiers="false",
    hot_batches="false",
    sharing="false",
    lr_schedule="linear",  # every kind of table must follow it
    seed=1,  # with 0 one weight of the shared array has a gradient of rounding only, which Adagrad makes a whole step
)
AHEAD_SIZES = (1, 3, 8)
COMBINATIONS = [
    frozenset(),
    *(frozenset({switch}) for switch in SWITCHES),
    *(frozenset(pair) for pair in itertools.combinations(SWITCHES, 2)),
    frozenset(SWITCHES) - {"sharing"},
    frozenset(SWITCHES),
]


def name_of(switches):
    return "+".join(sorted(switches)) or "none"


def reference_of(switches):
    """What a combination must agree with: shared parameters are another model, hot batches another order."""
    return name_of(switches & {"hot_batches", "sharing"})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switches")
    # A table of 20 rows is too small to share parameters: hot batches beside shared tables have something to do.
    items = tuple(replace(each, num_rows=20) if each.name == "category" else each for each in tiny().items)
    raw = generate_log(replace(tiny(), num_sessions=250, zipf=1.3, items=items), out=folder / "raw")
    cluster_sessions(raw, out=folder / "session", eval_fraction=0.2)
    profile_access(Dataset.load(folder / "session"), out=folder / "profile")
    return folder


def lookahead_entries(work: Path, nproc: int) -> list[dict]:
    """An epoch with its short last batch, evaluated in the middle of windows of 1, 3 and 8 batches, and without any."""
    plain, striped = work / f"plan-{nproc}-", work / f"plan-{nproc}-striped"
    tables = ShardPlan.load(plain).tables
    tier = {"kind": "global", "bytes": 0, "predicted_bytes_per_step": 0.0, "predicted_seconds_per_step": 0.0}
    with write_folder(striped, manifest_name=ShardPlan.manifest_name) as folder:
        placed = {
            name: replace(own, placement="tiered", tiers=(Tier(num_rows=rows_of(own), **tier),))
            for name, own in tables.items()
        }
        replace(ShardPlan.load(plain), tables=placed).seal(folder)
    base = replace(CONFIG, batch_size=256, max_steps=0, eval_every=5)
    shared = {"data": str(work / "session"), "hot_data": None, "allocation": None, "inputs": {}}
    entries = []
    for dedup in ("false", "true"):
        without = replace(base, dedup=dedup, tiers="auto")
        entries.append({**shared, "name": f"striped {dedup}", "plan": str(striped), "config": without.to_json()})
        for size in AHEAD_SIZES:
            ahead = replace(base, dedup=dedup, hot_batches="lookahead", lookahead_batches=size)
            entries.append({**shared, "name": f"ahead {size} {dedup}", "plan": str(plain), "config": ahead.to_json()})
    return entries


def rows_of(table: TablePlan) -> int:
    return sum(shard.size[0] for shard in table.shards)


def train_all(work: Path, nproc: int) -> dict:
    entries = []
    for switches in COMBINATIONS:
        chosen = sorted(switches & {"tiers", "hot_batches", "sharing"})
        plan = work / f"plan-{nproc}-{'-'.join(chosen)}"
        if not plan.exists():
            plan_shards(
                work / "profile",
                out=plan,
                topology=Topology(nodes=1, ranks_per_node=nproc),
                memory_budget_bytes=2**24,
                hot_budget_bytes=40_000 if "hot_batches" in switches else None,
                compress="4" if "sharing" in switches else None,
                strategy="tiers" if "tiers" in switches else "torchrec",
                batch_size=CONFIG.batch_size,
            )
        hot = None
        if "hot_batches" in switches:
            hot = f"hot-{'shared' if 'sharing' in switches else 'exact'}"
            if not (work / hot).exists():
                layout_hot(work / "session", plan, out=work / hot, rows_per_group=256)
        config = replace(
            CONFIG,
            dedup="true" if "dedup" in switches else "false",
            tiers="auto" if "tiers" in switches else "false",
            hot_batches="true" if "hot_batches" in switches else "false",
            sharing="true" if "sharing" in switches else "false",
            tuning="true" if "tuning" in switches else "false",
        )
        entries.append(
            {
                "name": name_of(switches),
                "data": str(work / "session"),
                "plan": str(plan),
                "hot_data": str(work / hot) if hot else None,
                "allocation": None,
                "inputs": {},
                "config": config.to_json(),
            }
        )
    entries += lookahead_entries(work, nproc)
    (work / "job.json").write_text(json.dumps({"combinations": entries}))
    script = Path(__file__).with_name("switches_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, str(script), str(work)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(work / f"results-{nproc}.pt")


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def results(request, work):
    return train_all(work, request.param)


def test_every_combination_trains(results):
    for name in map(name_of, COMBINATIONS):
        found = results[name]
        assert len(found["losses"]) == CONFIG.max_steps, name
        assert found["auc"] is not None, name


def test_every_switch_does_something(results):
    for switches in COMBINATIONS:
        found = results[name_of(switches)]
        assert found["dedup"] is ("dedup" in switches)
        assert (found["hot"] is not None) is ("hot_batches" in switches)
        assert ("SharedEmbeddingBagCollection" in found["stores"]) is ("sharing" in switches)
        if "hot_batches" in switches:
            assert found["hot"]["batches"]["hot"] > 0
            # Shared tables make no sample cold, and the one that is not shared is hot as a whole.
            assert (found["hot"]["batches"]["cold"] > 0) is ("sharing" not in switches)


@pytest.mark.parametrize("switches", COMBINATIONS, ids=name_of)
def test_a_combination_gives_its_references_weights(results, switches):
    found, expected = results[name_of(switches)], results[reference_of(switches)]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=2e-5, atol=1e-6)
    assert set(found["tables"]) == set(expected["tables"])
    for table, rows in expected["tables"].items():
        torch.testing.assert_close(found["tables"][table], rows, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dedup", ["false", "true"])
@pytest.mark.parametrize("size", AHEAD_SIZES)
def test_looking_ahead_changes_no_bit(results, size, dedup):
    found, expected = results[f"ahead {size} {dedup}"], results[f"striped {dedup}"]
    assert len(expected["losses"]) > 8
    assert set(found["stores"]) == {"TieredEmbeddingCollection"}
    assert found["losses"] == expected["losses"]
    assert found["auc"] == expected["auc"]
    for table, rows in expected["tables"].items():
        assert torch.equal(found["tables"][table], rows)


def test_tuning_changes_nothing_at_all(results):
    for table, rows in results["none"]["tables"].items():
        assert torch.equal(results["tuning"]["tables"][table], rows)
