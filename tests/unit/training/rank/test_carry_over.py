"""A trained model goes on with larger tables, in whatever holds them; what it lacks starts as in a new run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recmill.artifacts import Checkpoint, InputError
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.checkpoint import load_trained_model
from recmill.training.config import TrainConfig
from recmill.training.rank.carry_over import carry_over
from recmill.training.rank.worker import open_run
from recmill.training.serving import evaluate_checkpoint
from recmill.training.trainer import make_job, train
from tests.datasets import ranking_schema, write_dataset

CONFIG = TrainConfig(
    batch_size=64,
    bottom_layers=(16,),
    top_layers=(16,),
    eval_batch_size=512,
    threads=1,
    table_lr=0.1,
    dedup="false",
    hot_batches="false",
    tuning="false",
)
SHARED = replace(CONFIG, sharing="true", tiers="false")
STORES = {"TorchRecStore": CONFIG, "DiskStore": replace(CONFIG, table_memory_bytes=2_000)}
TABLES = {"interests": 50, "country": 7, "items": 40}
MORE = 12


def grown_schema():
    schema = ranking_schema()
    features = (replace(f, num_rows=f.num_rows + MORE) if f.kind != "dense" else f for f in schema.features)
    return replace(schema, features=tuple(features))


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def work(alone, tmp_path_factory):
    """Yesterday's data and model, today's data with more rows, and the same model with shared tables."""
    folder = tmp_path_factory.mktemp("grow")
    write_dataset(folder / "day1")
    write_dataset(folder / "day2", schema=grown_schema(), seed=1)
    options = {"topology": Topology.local(1), "memory_budget_bytes": 2**30}
    for day in ("day1", "day2"):
        profile = profile_access(folder / day, out=folder / f"{day}-profile")
        plan_shards(profile, out=folder / f"{day}-shared", compress=4.0, **options)
    plan_shards(profile, out=folder / "day2-tiers", **options | {"topology": Topology.local(2)})
    for name, config, plan in (("run", CONFIG, None), ("run-shared", SHARED, "shared")):
        (folder / name).mkdir()
        open_from(folder, folder / name, None, data="day1", config=config, plan=plan).train()
    return folder


def open_from(work, out, start_from, *, data="day2", config=CONFIG, plan=None):
    parts = {"plan": plan and work / f"{data}-{plan}", "allocation": None, "start_from": start_from}
    job = make_job(work / data, out=out, nproc=1, config=config, **parts)
    return open_run(job, torch.device("cpu"))


def rows_of(run):
    """{table: (weights, state)} of all rows, through the stores."""
    sizes = {table.name: table.num_rows for table in run.schema.tables}
    return {
        name: store.gather_rows(name, torch.arange(sizes[name]))
        for store in run.sharded.stores
        for name in store.tables
    }


@pytest.mark.parametrize("store", STORES)
def test_old_rows_are_carried_over_and_new_ones_are_those_of_a_new_run(work, tmp_path, alone, store):
    config = STORES[store]
    before = rows_of(open_from(work, tmp_path / "a", work / "run/checkpoint", data="day1"))
    fresh = rows_of(open_from(work, tmp_path / "b", None, config=config))
    run = open_from(work, tmp_path / "c", work / "run/checkpoint", config=config)
    assert store in {type(own).__name__ for own in run.sharded.stores}
    found = rows_of(run)
    assert found.keys() == TABLES.keys()
    for name, num_rows in TABLES.items():
        (weights, state), (old, old_state), (new, _) = found[name], before[name], fresh[name]
        assert len(weights) == num_rows + MORE
        assert torch.equal(weights[:num_rows], old)
        assert torch.equal(weights[num_rows:], new[num_rows:])
        assert not torch.equal(weights[:num_rows], new[:num_rows])
        for key in old_state:
            assert torch.equal(state[key][:num_rows], old_state[key])
            assert old_state[key].any()
            assert not state[key][num_rows:].any()
    adam = run.sharded.dense_optimiser.state
    assert {float(own["step"]) for own in adam.values()} == {25.0}  # 1,600 samples, 64 per step


def test_predictions_are_those_of_the_checkpoint_before_the_first_step(work, tmp_path, alone):
    run = open_from(work, tmp_path, work / "run/checkpoint", data="day1")
    expected = evaluate_checkpoint(work / "run/checkpoint", work / "day1")["metrics"]
    assert run.predict("test").accuracy()["log_loss"] == pytest.approx(expected["log_loss"], rel=1e-6)


def test_a_shared_array_is_carried_over_to_the_last_bit_and_to_whole_tables(work, tmp_path, alone):
    checkpoint = work / "run-shared/checkpoint"
    run = open_from(work, tmp_path / "a", checkpoint, data="day1", config=SHARED, plan="shared")
    (store,) = (own for own in run.sharded.stores if type(own).__name__ == "SharedEmbeddingBagCollection")
    (saved,) = load_trained_model(checkpoint)[0].embeddings.shared_arrays
    assert torch.equal(store.step.slots, saved.weight)
    expected = evaluate_checkpoint(checkpoint, work / "day1")["metrics"]["log_loss"]
    assert run.predict("test").accuracy()["log_loss"] == pytest.approx(expected, rel=1e-6)
    whole = open_from(work, tmp_path / "c", checkpoint, data="day1")
    assert whole.predict("test").accuracy()["log_loss"] == pytest.approx(expected, rel=1e-6)
    for name, (weights, _) in rows_of(whole).items():
        if name in store.array.tables:
            rows = torch.arange(TABLES[name])
            assert torch.equal(store.gather_rows(name, rows)[0], weights)
    grown = open_from(work, tmp_path / "d", checkpoint, config=SHARED, plan="shared")
    (tmp_path / "d").mkdir(exist_ok=True)
    start = grown.predict("test").accuracy()["log_loss"]
    grown.train()
    assert grown.state.evaluations[-1]["log_loss"] < start


def test_tiered_tables_of_two_processes_take_over_those_of_one(work, tmp_path, alone):
    """Rows that steps cannot move: the learning rates are far below the last bit of any weight."""
    checkpoint = work / "run/checkpoint"
    fixed = replace(CONFIG, tiers="true", max_steps=1, table_lr=1e-30, dense_lr=1e-30)
    out = tmp_path / "two"
    result = train(work / "day2", out=out, plan=work / "day2-tiers", start_from=checkpoint, nproc=2, config=fixed)
    assert result["curve"][0]["step"] == 1
    assert Checkpoint.load(out / "checkpoint").inputs["start_from"] == Checkpoint.load(checkpoint).content_hash
    (old, _), (found, _) = load_trained_model(checkpoint), load_trained_model(out / "checkpoint")
    fresh = rows_of(open_from(work, tmp_path / "fresh", None))
    weights, before = found.embeddings.table_weights(), old.embeddings.table_weights()
    for name, num_rows in TABLES.items():
        assert torch.equal(weights[name][:num_rows], before[name])
        assert torch.equal(weights[name][num_rows:], fresh[name][0][num_rows:])
    assert all(torch.equal(a, b) for a, b in zip(old.ranker.parameters(), found.ranker.parameters(), strict=True))
    with pytest.raises(InputError, match="start_from was"):
        train(work / "day2", out=out, plan=work / "day2-tiers", nproc=2, config=fixed)


def test_an_interrupted_run_resumes_to_the_same_losses(work, tmp_path, alone):
    config = replace(CONFIG, checkpoint_every=10)
    (tmp_path / "whole").mkdir()
    run = open_from(work, tmp_path / "whole", work / "run/checkpoint", config=config)
    expected = run.train()["curve"]
    losses = [entry["loss"] for entry in expected]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    (tmp_path / "new").mkdir()
    assert losses[0] < open_from(work, tmp_path / "new", None, config=config).train()["curve"][0]["loss"]
    (tmp_path / "cut").mkdir()
    run = open_from(work, tmp_path / "cut", work / "run/checkpoint", config=config)

    def stop(what, done, total):
        if what == "train step" and done >= 12:
            raise KeyboardInterrupt

    run.report = stop
    with pytest.raises(KeyboardInterrupt):
        run.train()
    found = open_from(work, tmp_path / "cut", work / "run/checkpoint", config=config).train()["curve"]
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in expected]


def test_rows_that_belong_to_other_values_start_anew(work, tmp_path, alone, monkeypatch):
    reused = {"items": np.array([3, 39])}
    monkeypatch.setattr("recmill.training.rank.carry_over.reused_rows", lambda *_: reused)
    run = open_from(work, tmp_path / "a", None)
    fresh = rows_of(run)["items"][0].clone()
    carry_over(work / "run/checkpoint", run.sharded, data=work / "day2")
    weights, state = rows_of(run)["items"]
    assert torch.equal(weights[[3, 39]], fresh[[3, 39]])
    assert not state["momentum1"][[3, 39]].any()
    others = [row for row in range(40) if row not in (3, 39)]
    assert not (weights[others] == fresh[others]).all(dim=1).any()


def with_feature(schema, feature, **changes):
    return replace(schema, features=tuple(replace(f, **changes) if f.name == feature else f for f in schema.features))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (with_feature(grown_schema(), "country", num_rows=5), "table 'country' has 5 rows, fewer than the 7"),
        (with_feature(grown_schema(), "country", dim=16), "feature 'country' has dim 16, .* was trained with 8"),
        (grown_schema().select(["age", "price", "country", "item", "history"]), "has no feature 'interests'"),
        (with_feature(grown_schema(), "age", name="height"), "has no feature 'age'"),
        (
            replace(
                grown_schema(), features=(*grown_schema().features, replace(ranking_schema().features[0], name="x"))
            ),
            "feature 'x' is new",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(work, tmp_path, schema, message):
    write_dataset(tmp_path / "data", schema=schema, rows=[("train", 40), ("test", 20)])
    with pytest.raises(InputError, match=message):
        train(tmp_path / "data", out=tmp_path / "out", start_from=work / "run/checkpoint", config=CONFIG)


def test_a_model_of_another_shape_is_refused(work, tmp_path):
    with pytest.raises(InputError, match="was trained with model=dlrm, not dcn"):
        train(
            work / "day2",
            out=tmp_path / "out",
            start_from=work / "run/checkpoint",
            config=replace(CONFIG, model="dcn"),
        )
