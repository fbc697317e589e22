"""What a run writes down: its JSON files, and runs in a real MLflow on SQLite."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest

from recmill.artifacts import Dataset, InputError, read_checked_json, read_json
from recmill.tracking import (
    Replayer,
    RunReference,
    close_run,
    default_tracking_uri,
    find_server,
    open_run,
    step_run,
    write_run_record,
)
from recmill.tracking.database import check_database
from recmill.tracking.recorder import JOURNAL_FOLDER, Journal
from recmill.tracking.server import explain_tracking_errors, open_experiment


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "KFP_RUN_ID", "RECMILL_TRACKING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start_parent(tracking_uri: str, pipeline_run_id: str = "run-1") -> RunReference:
    return open_run(
        tracking_uri=tracking_uri,
        name="demo",
        pipeline_run_id=pipeline_run_id,
        url="file:///report.html",
        params={"a": 1},
    )


def make_dataset(folder: Path) -> Dataset:
    (folder / "part-00000.parquet").write_bytes(b"rows")
    counts = {"num_rows": 4, "num_sessions": 2}
    part = {"file": "part-00000.parquet", "split": "train", "bytes": 4, "row_group_rows": [4], **counts}
    body = {"layout": "session", "parts": [part], **counts}
    Dataset.of_json(body).seal(folder)
    return Dataset.load(folder)


def test_a_step_leaves_its_seconds_metrics_inputs_and_outputs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    dataset = make_dataset(data)
    with step_run("generate_data", workdir=str(tmp_path), inputs={"preset": "tiny"}) as step:
        step.count(100)
        step.record({"auc": 0.75, "unknown": None, "undefined": float("nan")})
        reference = step.wrote("dataset", dataset)
    record = read_checked_json(tmp_path / "steps" / "generate_data.json")
    assert set(record) == {"step", "started_at", "seconds", "startup_seconds", "metrics", "inputs", "outputs"}
    assert 0 < record["startup_seconds"] == step.startup_seconds
    assert record["inputs"] == {"preset": "tiny"}
    assert (
        record["outputs"]
        == {"dataset": reference}
        == {"dataset": {"path": str(data), "content_hash": dataset.content_hash}}
    )
    assert record["metrics"]["auc"] == 0.75
    assert record["metrics"]["num_rows"] == 100
    assert record["metrics"]["written_bytes"] == 4
    assert not {"unknown", "undefined"} & set(record["metrics"])


def test_the_first_step_writes_the_run_record_where_nobody_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "abc")
    with step_run("generate_data", workdir=str(tmp_path), inputs={"preset": "small"}):
        pass
    record = read_json(tmp_path / "run.json")
    assert (record["kind"], record["preset"], record["pipeline_run_id"]) == ("run", "small", "abc")
    assert record["mlflow"]["run_id"] == ""


def test_every_step_moves_the_duration_of_the_run_on(tmp_path: Path) -> None:
    write_run_record(tmp_path, preset="tiny", pipeline_run_id="1", mlflow_run=RunReference())
    assert read_json(tmp_path / "run.json")["seconds"] == 0
    with step_run("report", workdir=str(tmp_path)):
        time.sleep(0.05)
    assert read_json(tmp_path / "run.json")["seconds"] >= 0.05


def test_wrong_input_is_said_in_one_line_and_leaves_no_step_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError), step_run("train_model", workdir=str(tmp_path)):
        raise InputError("a.parquet: no\nrows")
    assert capsys.readouterr().err.splitlines() == ["[train_model] started", "[train_model] error: a.parquet: no rows"]
    assert not (tmp_path / "steps").exists()


def test_steps_are_nested_runs_with_metrics_parameters_and_tags(
    tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = start_parent(tracking_uri)
    monkeypatch.setenv("KFP_RUN_ID", "run-1")
    monkeypatch.setenv("MLFLOW_RUN_ID", parent.run_id)  # a run the user resumes is the parent, not the step
    with step_run(
        "train_model",
        workdir=str(tmp_path),
        tracking_uri=tracking_uri,
        parent_run_id=parent.run_id,
        inputs={"nproc": 2},
    ) as step:
        data = tmp_path / "data"
        data.mkdir()
        step.log_dataset(make_dataset(data), context="training")
        step.record({"auc": 0.8})
        time.sleep(1.3)  # long enough for one sample of the machine's load
    client = mlflow.MlflowClient(tracking_uri)
    run = client.get_run(step.mlflow_run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id
    assert run.data.tags["kfp.pipeline_run_id"] == "run-1"
    assert run.data.params == {"nproc": "2"}
    assert run.data.metrics["auc"] == 0.8
    assert run.data.metrics["seconds"] > 1.3
    assert any(name.startswith("system/") for name in run.data.metrics)
    (logged,) = run.inputs.dataset_inputs
    content_hash = read_json(data / "dataset.json")["content_hash"]
    assert content_hash.removeprefix("sha256:").startswith(logged.dataset.digest)


def test_steps_of_a_local_run_reach_mlflow_through_their_journals(
    tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayer = Replayer(tracking_uri, name="demo", pipeline_run_id="local", url="file:///report.html", params={"a": 1})
    for name, value in replayer.environment.items():
        monkeypatch.setenv(name, value)
    inputs = {"preset": "tiny"}
    with step_run("generate_data", workdir=str(tmp_path), tracking_uri=tracking_uri, inputs=inputs) as step:
        data = tmp_path / "data"
        data.mkdir()
        step.log_dataset(make_dataset(data), context="training")
        step.recorder.points([("agent/loss", 0.5, 3, 1_700_000_000.0)])
        step.record({"auc": 0.8})
    with pytest.raises(KeyError), step_run("plan_shards", workdir=str(tmp_path), tracking_uri=tracking_uri):
        raise KeyError("x")
    Journal(replayer.environment[JOURNAL_FOLDER], step="report", inputs={})  # killed: it leaves without a word
    run = replayer.close(status="FAILED", metrics={"auc": 0.8})
    client = mlflow.MlflowClient(tracking_uri)
    parent = client.get_run(run.run_id)
    assert (parent.info.status, parent.data.metrics, parent.data.params) == ("FAILED", {"auc": 0.8}, {"a": "1"})
    below = client.search_runs([run.experiment_id], f"tags.mlflow.parentRunId = '{run.run_id}'")
    steps = {entry.info.run_name: entry for entry in below}
    assert {name: entry.info.status for name, entry in steps.items()} == {
        "generate_data": "FINISHED",
        "plan_shards": "FAILED",
        "report": "KILLED",
    }
    first = steps["generate_data"]
    assert first.data.params == {"preset": "tiny"}
    assert {"auc", "seconds", "startup_seconds", "agent/loss"} <= set(first.data.metrics)
    assert first.data.tags["kfp.pipeline_run_id"] == "local"
    assert len(first.inputs.dataset_inputs) == 1


def test_a_file_that_is_no_database_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, and long enough to be seen as none " * 20)
    with pytest.raises(InputError, match=r"mlflow.db: file is not a database; .*--no-tracking"):
        check_database(tmp_path / "mlflow.db")


def test_a_process_killed_while_mlflow_creates_its_tables_leaves_no_half_of_a_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    script = f"from recmill.tracking.server import open_experiment; open_experiment({uri!r})"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not any(found.stat().st_size for found in tmp_path.rglob("mlflow.db")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait(timeout=60)
    assert not (tmp_path / "mlflow.db").exists()
    assert open_experiment(uri)
    assert not list(tmp_path.glob(".mlflow.db.*"))


def test_processes_that_create_the_database_at_once_share_it(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    script = (
        f"from recmill.tracking.server import connect\nwith connect({uri!r}) as c: print(c.create_experiment(NAME))"
    )
    made = [
        subprocess.Popen(
            [sys.executable, "-c", script.replace("NAME", repr(name))], cwd=tmp_path, stdout=subprocess.PIPE
        )
        for name in ("one", "two")
    ]
    assert sorted(process.communicate(timeout=200)[0].strip() for process in made) == [b"1", b"2"]


def test_the_parent_run_carries_the_plugin_tags_and_ends_with_its_status(tracking_uri: str) -> None:
    parent = start_parent(tracking_uri, "run-2")
    close_run(parent, status="KILLED", metrics={"auc": 0.7})
    run = mlflow.MlflowClient(tracking_uri).get_run(parent.run_id)
    assert run.info.status == "KILLED"
    assert run.data.tags["kfp.pipeline_run_id"] == "run-2"
    assert run.data.tags["kfp.pipeline_run_url"] == "file:///report.html"
    assert run.data.metrics == {"auc": 0.7}
    assert run.data.params == {"a": "1"}


def test_artifacts_lie_beside_the_database(tracking_uri: str) -> None:
    parent = start_parent(tracking_uri)
    experiment = mlflow.MlflowClient(tracking_uri).get_experiment(parent.experiment_id)
    beside = Path(tracking_uri.removeprefix("sqlite:///")).with_name("mlartifacts")
    assert experiment.artifact_location == beside.as_uri()


def test_a_step_resumes_the_run_that_the_pipeline_server_made_for_it(
    tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start_parent(tracking_uri, "plugin")
    monkeypatch.setenv("MLFLOW_RUN_ID", made.run_id)
    monkeypatch.setenv("KFP_RUN_ID", "plugin")
    with step_run("report", workdir=str(tmp_path), tracking_uri=tracking_uri) as step:
        pass
    assert step.mlflow_run.run_id == made.run_id


def test_steps_without_a_parent_id_meet_below_one_run(
    tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "on-a-cluster")
    parents = set()
    for name in ("generate_data", "profile_access"):
        with step_run(name, workdir=str(tmp_path), tracking_uri=tracking_uri) as step:
            pass
        run = mlflow.MlflowClient(tracking_uri).get_run(step.mlflow_run.run_id)
        parents.add(run.data.tags["mlflow.parentRunId"])
    assert len(parents) == 1
    assert read_json(tmp_path / "run.json")["mlflow"]["run_id"] in parents
    parent = mlflow.MlflowClient(tracking_uri).get_run(parents.pop())
    assert parent.data.tags["kfp.pipeline_run_url"] == "/#/runs/details/on-a-cluster"


def test_a_step_that_crashes_is_a_failed_run(tmp_path: Path, tracking_uri: str) -> None:
    parent = start_parent(tracking_uri)
    with (
        pytest.raises(KeyError),
        step_run("plan_shards", workdir=str(tmp_path), tracking_uri=tracking_uri, parent_run_id=parent.run_id) as step,
    ):
        raise KeyError("x")
    assert mlflow.MlflowClient(tracking_uri).get_run(step.mlflow_run.run_id).info.status == "FAILED"


def test_a_curve_longer_than_one_request_arrives_whole(tmp_path: Path, tracking_uri: str) -> None:
    curve = [{"step": step, "samples": step, "seconds": step * 0.01, "loss": 1 / (1 + step)} for step in range(2_500)]
    evaluations = [{"step": 2_500, "epoch": 1, "auc": 0.8, "log_loss": 0.4, "normalised_entropy": None}]
    result = {"seconds": 25.0, "curve": curve, "evaluations": evaluations, "config": {"epochs": 1}}
    with step_run("train_model", workdir=str(tmp_path), tracking_uri=tracking_uri) as step:
        step.log_training(result)
    client = mlflow.MlflowClient(tracking_uri)
    history = client.get_metric_history(step.mlflow_run.run_id, "train_loss")
    assert [point.step for point in sorted(history, key=lambda point: point.step)] == list(range(2_500))
    metrics = client.get_run(step.mlflow_run.run_id).data.metrics
    assert metrics["eval_auc"] == 0.8
    assert "eval_normalised_entropy" not in metrics


def test_a_model_becomes_a_registered_version_that_predicts(tmp_path: Path, tracking_uri: str) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "import json, mlflow\n"
        "class Constant(mlflow.pyfunc.PythonModel):\n"
        "    def load_context(self, context):\n"
        "        self.value = json.load(open(context.artifacts['weights']))\n"
        "    def predict(self, context, model_input, params=None):\n"
        "        return [self.value] * len(model_input)\n"
        "mlflow.models.set_model(Constant())\n"
    )
    (tmp_path / "weights.json").write_text(json.dumps(0.25))
    mlflow.pyfunc.save_model(
        tmp_path / "model" / "mlflow",
        python_model=str(code),
        artifacts={"weights": str(tmp_path / "weights.json")},
        pip_requirements=["numpy"],
    )
    with step_run("train_model", workdir=str(tmp_path), tracking_uri=tracking_uri) as step:
        step.record({"auc": 0.9, "num_samples": 7})
        logged = step.log_model(tmp_path / "model", name="constant")
    assert logged["version"] == "1"
    client = mlflow.MlflowClient(tracking_uri)
    assert client.get_model_version("constant", "1").run_id == step.mlflow_run.run_id
    model = client.get_logged_model(logged["model_id"])
    # MLflow may tie samples of the machine's load to the model too.
    own = {metric.key: metric.value for metric in model.metrics if not metric.key.startswith("system/")}
    assert own == {"auc": 0.9}
    mlflow.set_tracking_uri(tracking_uri)
    assert mlflow.pyfunc.load_model(logged["model_uri"]).predict([[1], [2]]) == [0.25, 0.25]


def test_a_server_that_is_down_is_named_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(InputError, match=rf"MLflow at http://127.0.0.1:{port}: .*--no-tracking"):
        start_parent(f"http://127.0.0.1:{port}")
    assert time.monotonic() - begin < 15


def test_tracking_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECMILL_TRACKING", "off")
    with step_run("report", workdir=str(tmp_path), tracking_uri="http://127.0.0.1:1") as step:
        step.log_training({})
        assert step.log_model("nowhere") == {}
    assert (tmp_path / "steps" / "report.json").exists()


def test_runs_beside_each_other_share_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_tracking_uri(tmp_path / "runs" / "demo") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    with pytest.raises(InputError, match="MLFLOW_TRACKING_URI"):
        default_tracking_uri("s3://bucket/run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert default_tracking_uri("s3://bucket/run") == "http://mlflow:5000"


def test_steps_use_the_server_of_kubeflows_plugin_before_that_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plugin of Kubeflow Pipelines 2.17 sets with `injectUserEnvVars`."""
    monkeypatch.setenv("RECMILL_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("RECMILL_TRACKING_PASSWORD", "ours")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://plugin:5000")
    monkeypatch.setenv("MLFLOW_RUN_ID", "run-of-the-task")
    assert find_server() == "http://plugin:5000"
    assert os.environ["MLFLOW_RUN_ID"] == "run-of-the-task"
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ


@pytest.mark.parametrize(("endpoint", "keeps_run"), [("http://mlflow:5000/", True), ("http://other:5000", False)])
def test_a_run_of_the_plugin_is_resumed_only_on_its_own_server(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, keeps_run: bool
) -> None:
    """Without `injectUserEnvVars` the plugin names the step's run and its own settings, but sets no server."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RECMILL_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("RECMILL_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("RECMILL_TRACKING_PASSWORD", "ours")
    monkeypatch.setenv("MLFLOW_RUN_ID", "run-of-the-task")
    monkeypatch.setenv("KFP_MLFLOW_CONFIG", json.dumps({"endpoint": endpoint, "parentRunId": "p", "experimentId": "1"}))
    assert find_server() == "http://mlflow:5000"
    assert ("MLFLOW_RUN_ID" in os.environ) == keeps_run
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("admin", "ours")


def test_a_database_that_vanishes_is_one_sentence(tmp_path):
    """While MLflow creates its tables, SQLAlchemy says so, not MLflow."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/empty.db")
    with (
        pytest.raises(InputError, match=r"MLflow at sqlite:///empty.db: .*no such table: metrics.*turn tracking off"),
        explain_tracking_errors("sqlite:///empty.db"),
        engine.connect() as connection,
    ):
        connection.execute(sqlalchemy.text("ALTER TABLE metrics ADD COLUMN step BIGINT"))
