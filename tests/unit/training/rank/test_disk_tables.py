"""Training with tables on disk gives what training in memory gives, to the last bit, also after an interruption."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from recmill.artifacts import Checkpoint, InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Schema
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.checkpoint import load_trained_model
from recmill.training.config import TrainConfig
from recmill.training.rank.holders import assign_tables, tables_beyond_memory
from recmill.training.rank.worker import open_run
from recmill.training.trainer import make_job

CONFIG = TrainConfig(
    batch_size=64,
    max_steps=9,
    checkpoint_every=4,
    eval_batch_size=512,
    bottom_layers=(16,),
    top_layers=(16,),
    hot_batches="false",
    threads=1,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    raw = generate_log(replace(tiny(), num_sessions=150), out=folder / "raw")
    data = cluster_sessions(raw, out=folder / "data", layout="deduplicated", eval_fraction=0.2)
    profile = profile_access(data, out=folder / "profile")
    plan_shards(
        profile,
        out=folder / "plan",
        topology=Topology.local(1),
        memory_budget_bytes=2**30,
        hot_budget_bytes=20_000,
        strategy="torchrec",
    )
    return folder


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train_here(work, out, config, *, plan=None, stop_at=None):
    """Train in this process; `stop_at` interrupts when the losses of that step are reported."""
    out.mkdir(exist_ok=True)
    job = make_job(work / "data", out=out, plan=plan, allocation=None, nproc=1, config=config)
    run = open_run(job, torch.device("cpu"))

    def report(what, done, total):
        if what == "train step" and done == stop_at:
            raise KeyboardInterrupt

    run.report = report
    return run, run.train()


def tables_of(out):
    return load_trained_model(out / "checkpoint")[0].embeddings.table_weights()


def test_training_from_disk_equals_training_in_memory(work, tmp_path, alone):
    plan = work / "plan"
    _, expected = train_here(work, tmp_path / "memory", CONFIG, plan=plan)
    limited = replace(CONFIG, table_memory_bytes=50_000)
    with pytest.raises(KeyboardInterrupt):
        train_here(work, tmp_path / "disk", limited, plan=plan, stop_at=8)
    run, found = train_here(work, tmp_path / "disk", limited, plan=plan)
    stores = [store for store in run.sharded.stores if type(store).__name__ == "DiskStore"]
    assert stores
    assert any(len(table.hot_rows) for store in stores for table in store._tables.values())
    assert [entry["loss"] for entry in found["curve"]] == [entry["loss"] for entry in expected["curve"]]
    assert found["metrics"] == expected["metrics"]
    memory, disk = tables_of(tmp_path / "memory"), tables_of(tmp_path / "disk")
    assert memory.keys() == disk.keys()
    assert all(torch.equal(memory[name], disk[name]) for name in memory)
    assert not (tmp_path / "disk" / "tables").exists()
    assert Checkpoint.load(tmp_path / "disk" / "checkpoint").step == 9


def test_rows_of_the_next_batches_are_read_ahead(work, tmp_path, alone):
    job = make_job(
        work / "data",
        out=tmp_path,
        plan=None,
        allocation=None,
        nproc=1,
        config=replace(CONFIG, table_memory_bytes=50_000),
    )
    run = open_run(job, torch.device("cpu"))
    with run.ingest as feed:
        batches = iter(feed)
        position = feed.state_dict()
        run.train_step(*next(batches))
        stores = [store for store in run.sharded.stores if type(store).__name__ == "DiskStore"]
        assert all(len(store._ahead) == 2 for store in stores)
        assert feed.state_dict()["batch"] == position["batch"] + 1


def test_the_largest_tables_go_to_disk_until_the_rest_fits(work):
    schema = Schema.load(work / "data")
    sizes = {table.name: 4 * table.num_rows * (table.dim + 1) for table in schema.tables}
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    assert tables_beyond_memory(schema, TrainConfig()) == []
    limit = sum(sizes.values()) - sizes[by_size[0]]
    assert tables_beyond_memory(schema, replace(CONFIG, table_memory_bytes=limit)) == by_size[:1]
    assert tables_beyond_memory(schema, replace(CONFIG, table_memory_bytes=limit - 1)) == by_size[:2]
    assert tables_beyond_memory(schema, replace(CONFIG, table_memory_bytes=1)) == by_size


def test_on_a_gpu_the_same_tables_are_cached_instead(work):
    from recmill.planning.planner import default_plan

    schema = Schema.load(work / "data")
    plan = default_plan(schema, Topology.local(1))
    config = replace(CONFIG, table_memory_bytes=50_000)
    placed = assign_tables(schema, plan, config, device="cuda")
    assert set(placed.cached) == set(assign_tables(schema, plan, config).on_disk)
    assert not placed.on_disk
    assert not placed.elsewhere
    assert all(0 <= share < 1 for share in placed.cached.values())


def test_a_negative_limit_is_refused():
    with pytest.raises(InputError, match="table_memory_bytes is -1"):
        TrainConfig(table_memory_bytes=-1)
