"""The metrics of a model on real sessions equal an independent computation: scikit-learn, group by group."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.ikjt.batch import assemble_batch, decode_block
from recmill.data.schema import Schema
from recmill.data.sources import make_raw_log
from recmill.training.checkpoint import load_trained_model
from recmill.training.config import TrainConfig
from recmill.training.serving import evaluate_checkpoint
from recmill.training.trainer import train

FOLDER = Path(os.environ.get("RECMILL_DATA_DIR", "")) / "globo"
pytestmark = pytest.mark.skipif(not (FOLDER / "clicks.parquet").exists(), reason="globo is not in RECMILL_DATA_DIR")


def by_group(keys, *columns):
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    return list(zip(*(np.split(column[order], edges) for column in columns), strict=True))


@pytest.fixture(scope="module")
def globo(tmp_path_factory):
    """(metrics of a two-process run, dataset, checkpoint) on one in 200 users."""
    folder = tmp_path_factory.mktemp("globo")
    make_raw_log("globo", out=folder / "raw", overrides={"one_in": 200})
    data = cluster_sessions(folder / "raw", out=folder / "data", layout="deduplicated", eval_fraction=0.3)
    config = TrainConfig(batch_size=1024, max_steps=12, max_sequence_length=16)
    result = train(data.path, out=folder / "run", nproc=2, config=config)
    return result["metrics"], data, folder / "run" / "checkpoint"


def test_metrics_on_globo_equal_an_independent_computation(globo):
    metrics, data, checkpoint = globo
    schema, rows = Schema.load(data.path), read_table(data, split="test")
    model, _ = load_trained_model(checkpoint)
    batch = assemble_batch([(decode_block(rows, schema), 0, rows.num_rows)], schema, num_global=rows.num_rows)
    with torch.no_grad():
        scores = model(batch.dense_BF, batch.ids).numpy().astype(np.float64)
    labels, session = rows["label"].to_numpy().astype(float), rows["session_id"].to_numpy()
    user = rows["user"].combine_chunks().flatten().to_numpy()
    groups = [(y, s) for y, s in by_group(user, labels, scores) if 0 < y.mean() < 1]
    sizes = [len(y) for y, _ in groups]
    gauc = np.average([roc_auc_score(y, s) for y, s in groups], weights=sizes)
    lists = [(y, s) for y, s in by_group(session, labels, scores) if y.any()]
    recalls = []
    for y, s in lists:
        order = np.argsort(-s, kind="stable")
        recalls.append(y[order][:10].sum() / y.sum())
    probability = 1 / (1 + np.exp(-scores))
    expected = {
        "auc": roc_auc_score(labels, scores),
        "log_loss": log_loss(labels, probability),
        "gauc": gauc,
        "ndcg_at_10": np.mean([ndcg_score([y], [s], k=10) for y, s in lists]),
        "recall_at_10": np.mean(recalls),
        "calibration": probability.sum() / labels.sum(),
    }
    assert metrics["groups"]["kind"] == "user"
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_slices_on_globo_equal_counts_of_the_training_rows(globo):
    metrics, data, _ = globo
    train_rows, test_rows = (read_table(data, split=split, columns=["user", "article"]) for split in ("train", "test"))
    for feature in ("user", "article"):
        seen, counts = np.unique(train_rows[feature].combine_chunks().flatten().to_numpy(), return_counts=True)
        known = dict(zip(seen.tolist(), counts.tolist(), strict=True))
        of_sample = np.array([known.get(i, 0) for i in test_rows[feature].combine_chunks().flatten().tolist()])
        for entry in (entry for entry in metrics["slices"] if entry["feature"] == feature):
            chosen = (of_sample >= entry["low"]) & (of_sample < (entry["high"] or np.inf))
            assert entry["num_samples"] == chosen.sum()
        assert (of_sample == 0).sum() in [e["num_samples"] for e in metrics["slices"] if e["feature"] == feature]


def test_one_process_measures_what_two_did(globo):
    metrics, data, checkpoint = globo
    alone = evaluate_checkpoint(checkpoint, data.path)["metrics"]
    for name, value in alone["standard_errors"].items():
        assert alone[name] == pytest.approx(metrics[name], abs=1e-6)
        assert value == pytest.approx(metrics["standard_errors"][name], rel=0.01)
    assert [entry["num_samples"] for entry in alone["slices"]] == [entry["num_samples"] for entry in metrics["slices"]]
