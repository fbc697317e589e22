"""Checkpoints of training with tiers: at other world sizes, under other plans, in TorchRec's tables and back."""

import json
import multiprocessing
import os
import shutil
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from recmill.artifacts import ShardPlan
from recmill.artifacts.tensors import DTYPES
from recmill.cli.planning import plan
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.tensors.storage import TensorIndex, load_tensors
from tests.datasets import write_dataset

CONFIG = TrainConfig(
    batch_size=64,
    eval_batch_size=512,
    max_steps=6,
    bottom_layers=(8,),
    top_layers=(8,),
    threads=1,
    table_lr=0.1,
    dedup="false",
    hot_batches="false",
    sharing="false",
)
BUDGETS = {"four": 1_800, "two": 2_600, "one": 10_000}  # bytes a rank: less than copies of all rows need
# No latency and a slow link between nodes: copies pay even in tables of 50 rows.
LINKS = {"inter_node_bytes_per_s": 1e4, "intra_node_latency_s": 0.0, "inter_node_latency_s": 0.0}


def topology(nodes: int, ranks_per_node: int) -> Topology:
    return Topology(nodes=nodes, ranks_per_node=ranks_per_node, **LINKS)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Data, profiles of its first and last rows, and plans for 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("tier-checkpoints")
    write_dataset(folder / "data", rows=(("train", 800), ("test", 200)))
    profile_access(folder / "data", out=folder / "profile", split="train")
    profile_access(folder / "data", out=folder / "later", split="test")
    for name, shape in {"four": (2, 2), "two": (2, 1), "one": (1, 1)}.items():
        plan_shards(
            folder / "profile",
            out=folder / name,
            topology=topology(*shape),
            memory_budget_bytes=BUDGETS[name],
            batch_size=64,
            total_bytes_ratio=None,
            merge="off",  # which leaves more rows to the other tiers
        )
    plan_shards(
        folder / "profile",
        out=folder / "torchrec",
        topology=topology(2, 2),
        memory_budget_bytes=10_000,
        batch_size=64,
        strategy="torchrec",
    )
    return folder


def kinds_of(folder: Path) -> set[str]:
    return {tier.kind for entry in ShardPlan.load(folder).tables.values() for tier in entry.tiers}


def run_rank(rank: int, world_size: int, job: dict, trains: bool) -> None:
    """A rank of the command `recmill train`; without `trains` it saves what it has read."""
    from recmill.training.rank.worker import open_run

    out = Path(job["out"])
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{out}/rendezvous")
        run = open_run(job, torch.device("cpu"))
        if trains:
            run.train()
        else:
            run._save("checkpoint")
            run.saver.close()
        dist.destroy_process_group()
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


def run(
    work: Path, out: Path, plan: str, *, config: TrainConfig, start: Path | None = None, trains: bool = False
) -> Path:
    """Run the ranks of a plan, from the checkpoint of the run in `start`; gives the folder of the new run."""
    out.mkdir()
    if start is not None:
        shutil.copytree(start / "checkpoint", out / "checkpoints" / "step-00000006")
        shutil.copy(start / "metrics.jsonl", out)
    job = {
        "data": str(work / "data"),
        "plan": str(work / plan),
        "out": str(out),
        "config": config.to_json(),
        "hot_data": None,
        "allocation": None,
        "inputs": {},
    }
    world_size = ShardPlan.load(work / plan).world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recmill.training.rank.worker"])
    ranks = [context.Process(target=run_rank, args=(rank, world_size, job, trains)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in sorted(out.glob("error-*.txt"))]
    errors.sort(key=lambda text: "Connection" in text)  # a rank that lost its peer is not the one to blame
    assert not errors, errors[0]
    assert [process.exitcode for process in ranks] == [0] * world_size
    if start is not None and not (out / "metrics.jsonl").exists():
        shutil.copy(start / "metrics.jsonl", out)
    return out


def saved(run_folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random state: tables, their optimiser, and the dense half."""
    path = run_folder / "checkpoint"
    state = {
        key: torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
        for key, entry in TensorIndex.load(path).tensors.items()
        if not key.startswith("rng")
    }
    load_tensors(state, path, no_dist=True)
    return state


def assert_equal_states(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str) -> None:
    assert set(ours) == set(theirs), where
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), f"{key} in {where}"


@pytest.mark.parametrize("optimiser", ["rowwise_adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
def test_checkpoints_of_tiers_are_equal_at_every_world_size_and_plan(work, tmp_path, optimiser):
    assert kinds_of(work / "four") >= {"node", "global"}
    assert kinds_of(work / "two") & {"replicated", "node"}
    config = replace(CONFIG, table_optimiser=optimiser)
    first = run(work, tmp_path / "first", "four", config=config, trains=True)
    trained = saved(first)
    assert any(key.startswith("table_optimiser.") for key in trained) == (optimiser != "sgd")
    before = first
    for name in ("two", "one", "torchrec", "four"):
        again = run(work, tmp_path / name, name, config=config, start=before)
        assert_equal_states(trained, saved(again), name)
        before = again


def test_a_refreshed_plan_goes_on_from_the_same_checkpoint(work, tmp_path):
    (tmp_path / "topology.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in {"nodes": 2, "ranks_per_node": 2, **LINKS}.items())
    )
    options = ["--topology", tmp_path / "topology.yaml", "--memory-budget", f"{BUDGETS['four']}B", "--batch-size", "64"]
    options += ["--merge", "off", "--from", work / "four", "--steps", "1000000", "--out", work / "refreshed"]
    result = CliRunner().invoke(plan, list(map(str, [work / "later", *options])))
    assert result.exit_code == 0, result.output
    refresh = ShardPlan.load(work / "refreshed").refresh
    assert refresh.moved_rows > 0
    first = run(work, tmp_path / "first", "four", config=CONFIG, trains=True)
    longer = replace(CONFIG, max_steps=10)
    runs = [run(work, tmp_path / name, name, config=longer, start=first, trains=True) for name in ("four", "refreshed")]
    losses = [[entry["loss"] for entry in map(json.loads, (own / "metrics.jsonl").open())] for own in runs]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for key, value in saved(runs[0]).items():
        torch.testing.assert_close(saved(runs[1])[key], value, rtol=1e-5, atol=1e-6)
