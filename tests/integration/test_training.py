"""Real training runs with real processes: agreement over ranks, death and resumption, evaluation and export."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import psutil
import pytest

from recmill.artifacts import Checkpoint, InputError
from recmill.data.ingest import IngestPipeline
from recmill.serving import RequestBatch, RequestModel
from recmill.training.config import TrainConfig
from recmill.training.metrics.catalogue import headline_numbers
from recmill.training.preload import preloaded_ranks
from recmill.training.serving import evaluate_checkpoint, export_checkpoint
from recmill.training.trainer import train
from tests.datasets import ranking_schema, write_dataset

CONFIG = TrainConfig(
    batch_size=64,
    epochs=2,
    bottom_layers=(16,),
    top_layers=(16,),
    dropout=0.1,
    checkpoint_every=5,
    threads=1,
    table_lr=0.1,
    dense_lr=5e-3,
    lr_schedule="linear",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """An uninterrupted run on two processes that torchrun starts as two interpreters; the others fork their ranks."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RECMILL_FORKED_RANKS", "off")
        return out, train(dataset.path, out=out, nproc=2, config=CONFIG)


def losses(result):
    return [entry["loss"] for entry in result["curve"]]


def timeless(entries):
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def start_command(dataset, out, nproc, config=CONFIG):
    values = {key: ",".join(map(str, v)) if isinstance(v, list) else str(v) for key, v in config.to_json().items()}
    settings = [f"--set={key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "recmill", "train", dataset.path, "--out", str(out), "--nproc", str(nproc)]
    return subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, out, step):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended before step {step}: {process.stderr.read()}"
        if any(int(path.name.removeprefix("step-")) >= step for path in (out / "checkpoints").glob("step-*")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint at step {step} after 240 s")


def test_a_run_learns_and_says_what_it_did(finished):
    _, result = finished
    assert result["num_steps"] == 50
    assert result["num_samples"] == 3200
    assert [entry["step"] for entry in result["curve"]] == list(range(1, 51))
    assert np.mean(losses(result)[-10:]) < np.mean(losses(result)[:10]) - 0.02
    assert result["metrics"]["auc"] > 0.7
    assert len(result["evaluations"]) == 2
    assert 0 < result["evaluations"][0]["seconds"] <= result["seconds"]
    assert result["usage"]["num_samples"] == result["num_samples"]
    assert result["usage"]["cpu_seconds"] > 0


def test_one_and_two_processes_agree_on_the_loss(dataset, tmp_path):
    config = replace(CONFIG, dropout=0.0, epochs=1)
    one = train(dataset.path, out=tmp_path / "one", nproc=1, config=config)
    two = train(dataset.path, out=tmp_path / "two", nproc=2, config=config)
    np.testing.assert_allclose(losses(one), losses(two), rtol=2e-5)
    assert one["metrics"]["auc"] == pytest.approx(two["metrics"]["auc"], abs=0.002)


@pytest.fixture
def victim(request):
    """Whom the test kills. Of a preloaded command, torchrun is a fork of a server that has loaded TorchRec."""
    with preloaded_ranks(CONFIG.threads) if "preloaded" in request.param else nullcontext():
        yield request.param


@pytest.mark.parametrize("victim", ["command", "rank", "preloaded command"], indirect=True)
def test_a_killed_run_resumes_to_the_same_curve(dataset, finished, tmp_path, victim):
    process = start_command(dataset, tmp_path, nproc=2)
    wait_for_step(process, tmp_path, 10)
    if victim == "rank":
        agent_and_ranks = [
            child for child in psutil.Process(process.pid).children(recursive=True) if "agent" in str(child.cmdline())
        ]
        assert len(agent_and_ranks) == 3
        agent_and_ranks[-1].send_signal(signal.SIGKILL)
    else:
        process.kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    if victim == "rank":
        assert process.returncode == 1
        assert "exited without a report" in stderr
        assert "run the same command to resume" in stderr
    assert not (tmp_path / "result.json").exists()
    resumed = start_command(dataset, tmp_path, nproc=2)
    _, stderr = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, stderr
    result = json.loads((tmp_path / "result.json").read_text())
    _, expected = finished
    assert losses(result) == losses(expected)
    assert result["metrics"] == expected["metrics"]
    assert timeless(result["evaluations"]) == timeless(expected["evaluations"])


def test_a_run_resumes_at_another_number_of_processes(dataset, tmp_path):
    config = replace(CONFIG, dropout=0.0)
    whole = train(dataset.path, out=tmp_path / "whole", nproc=1, config=config)
    process = start_command(dataset, tmp_path / "cut", nproc=2, config=config)
    wait_for_step(process, tmp_path / "cut", 10)
    process.kill()
    process.communicate()
    result = train(dataset.path, out=tmp_path / "cut", nproc=1, config=config)
    np.testing.assert_allclose(losses(result), losses(whole), rtol=1e-4)


def test_a_finished_run_is_not_run_again(dataset, finished, tmp_path, monkeypatch):
    """And what a launcher left that was killed right after the run had finished is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "recmill-tmp-job-0123abcd").mkdir()
    out, result = finished
    started = time.monotonic()
    assert train(dataset.path, out=out, nproc=2, config=CONFIG) == result
    assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_evaluates_to_the_metrics_of_its_run(dataset, finished):
    out, result = finished
    metrics = evaluate_checkpoint(out / "checkpoint", dataset.path)["metrics"]
    assert metrics["auc"] == pytest.approx(result["metrics"]["auc"], abs=1e-6)
    assert metrics["log_loss"] == pytest.approx(result["metrics"]["log_loss"], rel=1e-5)
    numbers = headline_numbers(metrics)
    assert numbers == pytest.approx(headline_numbers(result["metrics"]), rel=1e-4)
    assert {"gauc", "ndcg_at_5", "recall_at_10", "hit_rate_at_5", "mrr", "calibration", "ece"} <= numbers.keys()
    assert metrics["groups"] == result["metrics"]["groups"]
    assert metrics["groups"]["kind"] == "user"
    slices = [(entry["feature"], entry["kind"], entry["num_samples"]) for entry in metrics["slices"]]
    assert slices == [(e["feature"], e["kind"], e["num_samples"]) for e in result["metrics"]["slices"]]
    assert {feature for feature, _, _ in slices} == {"country", "item"}


def test_an_exported_model_predicts_through_mlflow_what_the_checkpoint_predicts(dataset, finished, tmp_path):
    import mlflow

    from recmill.training.checkpoint import load_trained_model

    out, _ = finished
    result = export_checkpoint(out / "checkpoint", out=tmp_path / "model", data=dataset.path)
    batch = next(iter(IngestPipeline(dataset.path, split="test", batch_size=16, shuffle=False)))
    frame = pd.DataFrame({"age": batch.dense_BF[:, 0], "price": batch.dense_BF[:, 1]})
    for name, rows in batch.ids.to_dict().items():
        frame[name] = [part.tolist() for part in rows.to_dense()]
    served = mlflow.pyfunc.load_model(str(tmp_path / "model" / "mlflow")).predict(frame)
    model, _ = load_trained_model(out / "checkpoint")
    expected = model(batch.dense_BF, batch.ids).sigmoid().detach().numpy()
    np.testing.assert_allclose(served, expected, rtol=1e-4)
    auc = evaluate_checkpoint(out / "checkpoint", dataset.path)["metrics"]["auc"]
    forms = result["request"]["forms"]
    assert forms["float32"]["auc"] == pytest.approx(auc, abs=1e-6)
    assert forms["int8"]["auc"] == pytest.approx(auc, abs=5e-3)
    assert forms["int4"]["bytes"] < forms["int8"]["bytes"] <= forms["bf16"]["bytes"] < forms["float32"]["bytes"]
    # The same samples as requests with one candidate each.
    requests = RequestModel.load(tmp_path / "model")
    sides = {side: [f.name for f in requests.signature.of_side(side)] for side in ("user", "candidate")}
    assert sides == {"user": ["country", "history"], "candidate": ["interests", "item"]}
    columns = {side: {name: frame[name].tolist() for name in names} for side, names in sides.items()}
    columns["candidate"] |= {name: frame[name] for name in requests.signature.dense_candidate}
    found = requests.score(RequestBatch.of_lists(requests.signature, [1] * 16, **columns))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_early_stopping_keeps_the_best_weights(tmp_path):
    data = write_dataset(tmp_path / "data", rows=(("train", 400), ("valid", 200), ("test", 200)), rows_per_group=50)
    # So large a step overfits at once: the first evaluations are the best.
    config = replace(CONFIG, epochs=30, patience=2, table_lr=2.0, dense_lr=0.02, dropout=0.0)
    result = train(data.path, out=tmp_path / "run", nproc=1, config=config)
    aucs = [entry["auc"] for entry in result["evaluations"]]
    assert len(aucs) < 30
    assert max(aucs) == aucs[-3]
    kept = evaluate_checkpoint(tmp_path / "run" / "checkpoint", data.path, split="valid")["metrics"]["auc"]
    assert kept == pytest.approx(max(aucs), abs=1e-6)


def test_what_a_user_gets_wrong_is_one_sentence(dataset, finished, tmp_path):
    out, _ = finished
    with pytest.raises(InputError, match=r"holds a run with other settings .*epochs was 2, is 3"):
        train(dataset.path, out=out, nproc=2, config=replace(CONFIG, epochs=3))
    with pytest.raises(InputError, match="2000 rows, fewer than the 5000 training processes"):
        train(dataset.path, out=tmp_path / "a", nproc=5000, config=CONFIG)
    with pytest.raises(InputError, match="dim 6, expected a multiple of 4"):
        train(write_dataset(tmp_path / "odd", schema=ranking_schema(6)).path, out=tmp_path / "b", config=CONFIG)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match=r"holds no job\.json"):
        train(dataset.path, out=tmp_path / "mine", config=CONFIG)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(InputError, match="cannot be used"):
            train(dataset.path, out=tmp_path / "c", config=CONFIG, port=busy.getsockname()[1])
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_truncated_part_is_named(tmp_path):
    data = write_dataset(tmp_path / "data")
    part = tmp_path / "data" / "part-00000.parquet"
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(InputError, match=r"part-00000.parquet: has \d+ bytes, dataset.json says"):
        train(data.path, out=tmp_path / "run", config=CONFIG)


def test_a_diverged_loss_stops_with_advice(dataset, tmp_path):
    with pytest.raises(InputError, match=r"the loss is .* at step .*: lower dense_lr or table_lr"):
        train(dataset.path, out=tmp_path / "run", config=replace(CONFIG, dense_lr=1e30))


def test_the_final_checkpoint_is_sealed(finished):
    out, result = finished
    checkpoint = Checkpoint.load(out / "checkpoint", verify=True)
    assert checkpoint.step == result["num_steps"]
    assert not (out / "checkpoints").exists()
