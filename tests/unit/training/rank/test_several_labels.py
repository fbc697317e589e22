"""Training on several labels in one process: what is measured, resumed, evaluated and exported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score

from recmill.artifacts import InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.ikjt.batch import assemble_batch, decode_block
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.model.servable import ServableModel
from recmill.training.checkpoint import load_trained_model
from recmill.training.config import TrainConfig
from recmill.training.rank.worker import open_run
from recmill.training.serving import evaluate_checkpoint
from recmill.training.trainer import make_job

LABELS = ("click", "purchase")
CONFIG = TrainConfig(
    batch_size=128,
    max_steps=9,
    eval_batch_size=512,
    bottom_layers=(16,),
    top_layers=(16,),
    tower_layers=(8,),
    num_experts=2,
    threads=1,
    checkpoint_every=4,
    task_weights=(1.0, 2.0),
    multi_task="ple",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    raw = generate_log(replace(tiny(), num_sessions=250, labels=LABELS), out=folder / "raw")
    for layout in ("time", "session", "deduplicated"):
        cluster_sessions(raw, out=folder / layout, layout=layout, eval_fraction=0.2)
    return folder


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start(data, out, config=CONFIG, layout="deduplicated"):
    out.mkdir(exist_ok=True)
    job = make_job(data / layout, out=out, plan=None, allocation=None, nproc=1, config=config)
    return open_run(job, torch.device("cpu"))


def losses(result):
    return [entry["loss"] for entry in result["curve"]]


@pytest.mark.parametrize("layout", ["time", "session", "deduplicated"])
def test_every_layout_holds_and_reads_all_labels(data, layout):
    rows = read_table(data / layout)
    assert rows.column_names[:4] == ["session_id", "timestamp", *LABELS]
    found = torch.cat([b.label_BT for b in IngestPipeline(data / layout, split="all", batch_size=256)])
    assert found.shape == (rows.num_rows, 2)
    assert found.sum(0).tolist() == [sum(rows[name].to_pylist()) for name in LABELS]
    pairs = sorted(zip(*(rows[name].to_pylist() for name in LABELS), strict=True))
    assert sorted(map(tuple, found.tolist())) == pairs


@pytest.mark.parametrize("kind", ["shared", "mmoe", "ple"])
def test_deduplication_keeps_the_loss(data, alone, tmp_path, kind):
    config = replace(CONFIG, multi_task=kind, checkpoint_every=1000, model="dcn" if kind == "mmoe" else "dlrm")
    plain = start(data, tmp_path / "plain", replace(config, dedup="false")).train()
    deduplicated = start(data, tmp_path / "dedup", replace(config, dedup="true")).train()
    np.testing.assert_allclose(losses(plain), losses(deduplicated), rtol=1e-5)


def test_a_stopped_run_resumes_to_the_same_weights_and_metrics(data, alone, tmp_path):
    whole = start(data, tmp_path / "whole").train()

    def stop(what, done, total):
        if what == "train step" and done >= 8:
            raise RuntimeError("stopped")

    torch.manual_seed(0)
    broken = start(data, tmp_path / "cut")
    broken.report = stop
    with pytest.raises(RuntimeError, match="stopped"):
        broken.train()
    resumed = start(data, tmp_path / "cut")
    assert resumed.state.step == 4
    result = resumed.train()
    assert losses(result) == losses(whole)
    assert result["metrics"] == whole["metrics"]


def test_every_label_is_measured_and_evaluated_alike(data, alone, tmp_path):
    run = start(data, tmp_path / "run")
    metrics = run.train()["metrics"]
    assert metrics["labels"] == list(LABELS)
    assert {name: metrics[name] for name in metrics["tasks"]["click"]} == metrics["tasks"]["click"]
    assert set(run.state.evaluations[0]["tasks"]) == set(LABELS)
    model, _ = load_trained_model(tmp_path / "run" / "checkpoint")
    rows = read_table(data / "session", split="test")
    schema = Schema.load(data / "session")
    batch = assemble_batch([(decode_block(rows, schema), 0, rows.num_rows)], schema, num_global=rows.num_rows)
    with torch.no_grad():
        logits = model(batch.dense_BF, batch.ids).double().numpy()
    for position, name in enumerate(LABELS):
        truth = rows[name].to_numpy()
        assert metrics["tasks"][name]["auc"] == pytest.approx(roc_auc_score(truth, logits[:, position]), abs=1e-6)
        probability = 1 / (1 + np.exp(-logits[:, position]))
        assert metrics["tasks"][name]["log_loss"] == pytest.approx(log_loss(truth, probability), abs=1e-6)
    again = evaluate_checkpoint(tmp_path / "run" / "checkpoint", data / "session")["metrics"]
    for name in LABELS:
        assert again["tasks"][name]["gauc"] == pytest.approx(metrics["tasks"][name]["gauc"], abs=1e-6)
        assert again["tasks"][name]["standard_errors"].keys() == metrics["tasks"][name]["standard_errors"].keys()


def test_the_servable_model_gives_one_score_per_label(data, alone, tmp_path):
    start(data, tmp_path / "run", replace(CONFIG, multi_task="mmoe")).train()
    model, _ = load_trained_model(tmp_path / "run" / "checkpoint")
    program = ServableModel(model).export().module()
    batch = next(iter(IngestPipeline(data / "session", split="test", batch_size=32, shuffle=False)))
    ids = [torch.nn.utils.rnn.pad_sequence(b.to_dense(), True, -1) for b in batch.ids.to_dict().values()]
    ids = [rows if rows.shape[1] else rows.new_full((len(rows), 1), -1) for rows in ids]
    with torch.no_grad():
        served, expected = program(batch.dense_BF, ids), model(batch.dense_BF, batch.ids).sigmoid()
    assert served.shape == (32, 2)
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-6)


def test_settings_that_do_not_fit_the_labels_are_one_sentence(data, tmp_path):
    wrong = {"task_weights": (1.0, 1.0, 1.0)}
    with pytest.raises(
        InputError, match=r"task_weights has 3 weight\(s\), expected one for each label of .*click, purchase"
    ):
        make_job(data / "time", out=tmp_path, plan=None, allocation=None, nproc=1, config=replace(CONFIG, **wrong))
    generate_log(replace(tiny(), num_sessions=50), out=tmp_path / "raw")
    single = cluster_sessions(tmp_path / "raw", out=tmp_path / "one", eval_fraction=0.2)
    config = TrainConfig(multi_task="mmoe")
    with pytest.raises(InputError, match=r"multi_task=mmoe needs several labels; .*schema.json names only 'label'"):
        make_job(single.path, out=tmp_path, plan=None, allocation=None, nproc=1, config=config)
