"""Two labels on two processes: every switch trains them, and what is exact gives the reference's losses."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recmill.data.cluster import cluster_sessions
from recmill.data.hot.layout import layout_hot
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig

CONFIG = TrainConfig(
    batch_size=128,
    eval_batch_size=512,
    max_steps=8,
    bottom_layers=(16,),
    top_layers=(16,),
    tower_layers=(8,),
    num_experts=2,
    threads=1,
    dedup="false",
    tiers="false",
    hot_batches="false",
    sharing="false",
    tuning="false",
    seed=1,
)
ON = {"dedup": "true", "tiers": "auto"}
# name -> (settings, plan, the run it must agree with)
RUNS = {
    "shared": ({"multi_task": "shared"}, "tiers", None),
    "shared on": ({"multi_task": "shared", **ON}, "tiers", "shared"),
    "mmoe": ({"multi_task": "mmoe"}, "tiers", None),
    "mmoe on": ({"multi_task": "mmoe", **ON}, "tiers", "mmoe"),
    "ple": ({"multi_task": "ple", "model": "dcn"}, "tiers", None),
    "ple on": ({"multi_task": "ple", "model": "dcn", **ON}, "tiers", "ple"),
    "hot": ({"multi_task": "mmoe", "hot_batches": "true"}, "hot", None),
    "hot on": ({"multi_task": "mmoe", "hot_batches": "true", "dedup": "true"}, "hot", "hot"),
    "sharing": ({"multi_task": "mmoe", "sharing": "true"}, "sharing", None),
    "sharing on": ({"multi_task": "mmoe", "sharing": "true", "dedup": "true"}, "sharing", "sharing"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    work = tmp_path_factory.mktemp("labels")
    log = replace(tiny(), num_sessions=250, zipf=1.3, labels=("click", "purchase"))
    data = cluster_sessions(generate_log(log, out=work / "raw"), out=work / "session", eval_fraction=0.2)
    profile_access(data, out=work / "profile")
    options = {"topology": Topology(nodes=1, ranks_per_node=2), "memory_budget_bytes": 2**24, "batch_size": 128}
    plan_shards(work / "profile", out=work / "tiers", strategy="tiers", **options)
    plan_shards(work / "profile", out=work / "hot", strategy="torchrec", hot_budget_bytes=40_000, **options)
    plan_shards(work / "profile", out=work / "sharing", strategy="torchrec", compress="4", **options)
    layout_hot(data, work / "hot", out=work / "hot-data", rows_per_group=256)
    entries = [
        {
            "name": name,
            "data": data.path,
            "plan": str(work / plan),
            "hot_data": str(work / "hot-data") if plan == "hot" else None,
            "allocation": None,
            "inputs": {},
            "config": replace(CONFIG, **settings).to_json(),
        }
        for name, (settings, plan, _) in RUNS.items()
    ]
    (work / "job.json").write_text(json.dumps({"combinations": entries}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("switches_rank.py")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, str(script), str(work)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = {name: json.loads((work / "out-2" / name / "result.json").read_text())["metrics"] for name in RUNS}
    return torch.load(work / "results-2.pt"), metrics


@pytest.mark.parametrize("name", RUNS)
def test_every_label_is_trained_and_measured(results, name):
    found, metrics = results
    assert len(found[name]["losses"]) == CONFIG.max_steps
    assert set(metrics[name]["tasks"]) == {"click", "purchase"}
    assert metrics[name]["tasks"]["purchase"]["base_rate"] < metrics[name]["tasks"]["click"]["base_rate"]
    assert found[name]["dedup"] is name.endswith(" on")


@pytest.mark.parametrize(("name", "reference"), [(name, own[2]) for name, own in RUNS.items() if own[2]])
def test_switches_keep_the_loss_of_several_labels(results, name, reference):
    found, metrics = results
    np.testing.assert_allclose(found[name]["losses"], found[reference]["losses"], rtol=1e-4)
    for label in ("click", "purchase"):
        theirs = metrics[reference]["tasks"][label]
        assert metrics[name]["tasks"][label]["log_loss"] == pytest.approx(theirs["log_loss"], rel=1e-3)
