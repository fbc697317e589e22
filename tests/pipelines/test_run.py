"""`recmill run` for real, on a few hundred sessions: one run that several facts are read from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner

from pipelines.commands import run
from pipelines.train import steps_of
from recmill.artifacts import InputError, read_json
from recmill.training.switches import Switch

STEPS = steps_of(with_baseline=True, with_sharing=True)
pytestmark = pytest.mark.timeout(900)  # one fixture runs the whole pipeline; a busy machine takes minutes
SMALL = (
    "--preset",
    "tiny",
    "--set",
    "data.sessions=150",
    "--set",
    "batch_size=256",
    "--set",
    "threads=1",
    "--with-sharing",
)


def recmill(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("recmill")
    ours = ("MLFLOW_", "RECMILL_", "KFP_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [program, *args], capture_output=True, text=True, check=False, env=inherited | environment, timeout=800
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    outcome = recmill("run", *SMALL, "--out", str(folder), "--json")
    assert outcome.returncode == 0, outcome.stderr
    return folder, json.loads(outcome.stdout), outcome.stderr


def test_a_run_leaves_every_artifact_and_the_report(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, said = finished
    assert {path.name for path in folder.iterdir()} >= {
        "raw",
        "dataset",
        "profile",
        "plan",
        "allocation",
        "baseline",
        "train",
        "shared",
        "model",
        "steps",
        "report.html",
        "run.json",
        "run.log",
    }
    assert {path.stem for path in (folder / "steps").iterdir()} == set(STEPS)
    assert results["report"] == str(folder / "report.html")
    assert said == ""  # --json is silent


def test_the_results_are_those_of_the_training(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = finished
    trained = read_json(folder / "train" / "result.json")
    assert results["metrics"]["auc"] == trained["metrics"]["auc"]
    assert results["metrics"]["log_loss"] == trained["metrics"]["log_loss"]
    assert results["metrics"]["auc"] < results["metrics"]["best_reachable_auc"] < 1
    assert (
        results["steps"]["generate_data"]["metrics"]["num_rows"]
        == read_json(folder / "dataset/dataset.json")["num_rows"]
    )
    assert [entry["switch"] for entry in results["decisions"]] == [switch.value for switch in Switch]
    record = read_json(folder / "run.json")
    assert record["kind"] == "run"
    assert record["seconds"] >= sum(step["seconds"] for step in results["steps"].values())


def test_the_baseline_is_the_same_model_with_every_switch_off(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = finished
    ours, baseline, shared = (read_json(folder / place / "train/result.json") for place in ("", "baseline", "shared"))
    assert baseline["data"]["layout"] == "time"
    assert {baseline["config"][switch] for switch in Switch} == {"false"}
    assert not any(entry["is_on"] for entry in baseline["decisions"])
    assert read_json(folder / "baseline/plan/plan.json")["strategy"] == "torchrec"
    same = [name for name in ours["config"] if name not in set(Switch)]
    for other in (baseline, shared):
        assert [other["config"][name] for name in same] == [ours["config"][name] for name in same]
        assert other["num_samples"] == ours["num_samples"]
    assert [entry["is_on"] for entry in shared["decisions"] if entry["switch"] == "sharing"] == [True]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.index('id="gains"') < page.index('id="pipeline"')
    assert results["steps"]["train_baseline"]["metrics"]["auc"] == baseline["metrics"]["auc"]


def test_mlflow_holds_the_run_its_steps_and_the_model(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = finished
    assert results["mlflow"]["tracking_uri"] == f"sqlite:///{folder.parent / 'mlflow.db'}"
    client = mlflow.MlflowClient(results["mlflow"]["tracking_uri"])
    parent = client.get_run(results["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["kfp.pipeline_run_id"] == results["pipeline_run_id"]
    assert parent.data.metrics["auc"] == results["metrics"]["auc"]
    below = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    assert {step.info.run_name: step.info.status for step in below} == dict.fromkeys(STEPS, "FINISHED")
    training = next(step for step in below if step.info.run_name == "train_model")
    assert client.get_metric_history(training.info.run_id, "train_loss")
    assert training.inputs.dataset_inputs
    for entry in results["decisions"]:
        told = training.data.params[f"decided.{entry['switch']}"]
        assert told == f"{'on' if entry['is_on'] else 'off'}: {entry['reason']}"
    version = client.get_model_version("recmill-dlrm", "1")
    assert version.run_id == training.info.run_id
    (model,) = client.search_logged_models([parent.info.experiment_id])
    assert version.source == f"models:/{model.model_id}"
    assert {metric.key: metric.value for metric in model.metrics}["auc"] == results["metrics"]["auc"]


def test_the_same_call_again_is_safe_and_other_arguments_are_refused(
    finished: tuple[Path, dict[str, Any], str],
) -> None:
    folder, results, _ = finished
    refused = recmill("run", *SMALL, "--out", str(folder), "--nproc", "2")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"recmill: error: {folder}: holds another run (nproc was 1, is 2)")
    again = recmill("run", *SMALL, "--out", str(folder), "--no-tracking")
    assert again.returncode == 0, again.stderr
    assert f"{results['metrics']['auc']:.4f}" in again.stdout
    assert f"report: {folder / 'report.html'}" in again.stdout
    assert {line.split()[1] for line in again.stderr.splitlines() if "done in" in line} == set(STEPS)


def test_wrong_data_ends_in_one_line_and_exit_code_2(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    outcome = recmill("run", "--data", str(empty), "--out", str(tmp_path / "run"), "--no-tracking", "--json")
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"recmill: error: {empty}")


def test_a_dead_mlflow_server_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    outcome = recmill("run", "--out", str(tmp_path / "run"), MLFLOW_TRACKING_URI="http://127.0.0.1:1")
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("recmill: error: MLflow at http://127.0.0.1:1: the server does not answer")
    assert not (tmp_path / "run" / "raw").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--set", "bogus=1"), "unknown setting 'bogus'"),
        (("--set", "epochs=two"), "expected a whole number"),
        (("--set", "epochs"), "expected name=value"),
        (("--out", "memory://run"), "needs a folder or a store"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(args: tuple[str, ...], says: str) -> None:
    outcome = CliRunner().invoke(run, ["--no-tracking", *args])
    assert isinstance(outcome.exception, InputError)
    assert says in str(outcome.exception)


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    outcome = CliRunner().invoke(run, ["--no-tracking", "--out", str(tmp_path)])
    assert isinstance(outcome.exception, InputError)
    assert "holds no run.json" in str(outcome.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
