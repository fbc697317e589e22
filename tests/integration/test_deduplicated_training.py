"""Training once a distinct row gives what training once a sample gives, on one and on two processes."""

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Schema
from recmill.data.sources import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.rank.dedup import DedupChoice, choose_dedup
from recmill.training.trainer import train

CONFIG = TrainConfig(batch_size=256, bottom_layers=(16,), top_layers=(16,), threads=1, max_steps=12, eval_every=12)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same sessions, one record a sample and one record a session."""
    folder = tmp_path_factory.mktemp("sessions")
    make_raw_log("tiny", out=folder / "raw", overrides={"sessions": "300"})
    return {
        layout: cluster_sessions(
            folder / "raw", out=folder / layout, layout=layout, eval_fraction=0.2, rows_per_group=512
        ).path
        for layout in ("session", "deduplicated")
    }


def losses(result):
    return [entry["loss"] for entry in result["curve"]]


@pytest.mark.parametrize(("optimiser", "nproc"), [("sgd", 1), ("rowwise_adagrad", 2)])
def test_dedup_keeps_the_loss(datasets, tmp_path, optimiser, nproc):
    settings = {"table_optimiser": optimiser, "sequence_encoder": "transformer"}
    plain = train(
        datasets["session"],
        out=tmp_path / "plain",
        nproc=nproc,
        config=TrainConfig.from_overrides(settings | {"dedup": "false"}, base=CONFIG),
    )
    shared = train(
        datasets["deduplicated"],
        out=tmp_path / "shared",
        nproc=nproc,
        config=TrainConfig.from_overrides(settings | {"dedup": "true"}, base=CONFIG),
    )
    assert not plain["dedup"]["groups"]
    assert "history" in {name for group in shared["dedup"]["groups"] for name in group}
    assert "history" in shared["dedup"]["ids"]
    np.testing.assert_allclose(losses(shared), losses(plain), rtol=1e-4)
    assert shared["metrics"]["auc"] == pytest.approx(plain["metrics"]["auc"], abs=1e-4)


def test_auto_leaves_alone_what_does_not_repeat(tmp_path):
    make_raw_log("tiny", out=tmp_path / "raw", overrides={"sessions": "3000", "samples_per_session": "1"})
    data = cluster_sessions(tmp_path / "raw", out=tmp_path / "data", eval_fraction=0.2, rows_per_group=512)
    config = TrainConfig.from_overrides({"dedup": "auto", "max_steps": "2", "eval_every": "2"}, base=CONFIG)
    assert train(data.path, out=tmp_path / "run", config=config)["dedup"] == {"groups": [], "windows": []}


def test_auto_looks_up_ids_once_where_that_saves_many(datasets, monkeypatch):
    dataset = Dataset.load(datasets["session"])
    schema = Schema.load(dataset.path)
    assert choose_dedup(dataset, schema, CONFIG).ids == ()
    monkeypatch.setattr("recmill.training.rank.dedup.MIN_SAVED_IDS", 20)
    assert "history" in choose_dedup(dataset, schema, CONFIG).ids
    assert choose_dedup(dataset, schema, replace(CONFIG, dedup="false")) == DedupChoice()


def test_numbers_that_repeat_keep_the_loss_on_ranks_with_different_distinct_rows(tmp_path):
    raw = tmp_path / "raw"
    make_raw_log("tiny", out=raw, overrides={"sessions": "300"})
    numbers = [feature.name for feature in Schema.load(raw).dense]
    for path in raw.glob("*.parquet"):
        table = pq.read_table(path)
        for name in numbers:
            few = pc.greater(table[name], 2.0).cast("float32")  # mostly 0
            table = table.set_column(table.schema.get_field_index(name), table.field(name), few)
        pq.write_table(table, path)
    data = cluster_sessions(raw, out=tmp_path / "data", layout="deduplicated", eval_fraction=0.2, rows_per_group=512)
    results = {}
    for dedup in ("false", "auto"):
        config = TrainConfig.from_overrides({"dedup": dedup}, base=CONFIG)
        results[dedup] = train(data.path, out=tmp_path / dedup, nproc=2, config=config)
    assert "dense" not in results["false"]["dedup"]
    assert results["auto"]["dedup"]["dense"] == numbers
    np.testing.assert_allclose(losses(results["auto"]), losses(results["false"]), rtol=1e-4)
