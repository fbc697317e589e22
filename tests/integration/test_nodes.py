"""Training on several nodes is the same `train()`: the nodes of a TrainJob's manifest, as processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from components.placement import ClusterPlacement
from components.train_model.train_job import JOB, launch_folder, make_train_job
from recmill.artifacts import dump_json
from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.trainer import train

CONFIG = TrainConfig(
    batch_size=128, eval_batch_size=512, max_steps=8, bottom_layers=(16,), top_layers=(16,), hot_batches="true"
)
ROOT = Path(__file__).parents[2]


def launch_nodes(job: Mapping[str, Any], folder: Path, nproc: int) -> None:
    """What the TrainJob's runtime does: torchrun once per node, told by PET_* who is who."""
    launch_folder(folder).mkdir()
    (launch_folder(folder) / JOB).write_text(dump_json(job), encoding="utf-8")
    manifest = make_train_job(job, folder, num_nodes=nproc, num_local=1, placement=ClusterPlacement(image="trainer:t1"))
    trainer = manifest["spec"]["trainer"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert trainer["command"][0] == "python3"
    given = {entry["name"]: entry["value"] for entry in trainer["env"]}
    common = {"PET_NNODES": str(nproc), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    nodes = [
        subprocess.Popen(
            [sys.executable, *trainer["command"][1:], *trainer["args"]],
            env={**os.environ, **given, **common, "PET_NODE_RANK": str(node), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(trainer["numNodes"])
    ]
    for node in nodes:
        _, said = node.communicate(timeout=240)
        assert node.returncode == 0, said[-3000:]


@pytest.mark.timeout(300)
def test_two_nodes_train_hot_batches_as_two_processes_of_one_machine_do(tmp_path: Path) -> None:
    raw = make_raw_log("tiny", out=tmp_path / "raw", overrides={"sessions": "200", "zipf": "1.3"})
    data = cluster_sessions(raw, out=tmp_path / "data", eval_fraction=0.2)
    profile = profile_access(data, out=tmp_path / "profile")
    plan_shards(
        profile,
        out=tmp_path / "plan",
        topology=Topology(nodes=2, ranks_per_node=1),
        memory_budget_bytes=2**24,
        hot_budget_bytes=40_000,
        batch_size=CONFIG.batch_size,
    )
    given = {"plan": tmp_path / "plan", "nproc": 2, "config": CONFIG}
    alone = train(data.path, out=tmp_path / "alone", **given)
    nodes = train(data.path, out=tmp_path / "nodes", launcher=launch_nodes, **given)
    assert alone["hot"]["batches"]["hot"] > 0
    assert nodes["hot"] == alone["hot"]
    assert [point["loss"] for point in nodes["curve"]] == [point["loss"] for point in alone["curve"]]
