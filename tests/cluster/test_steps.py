"""Every step as a real pod: its real image, command and account, artifacts on the volume, MLflow in the cluster."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines.commands import compile_pipeline
from tests.cluster.deployment import TestSite
from tests.cluster.tasks import PipelineRun
from tests.event_logs import Options, Shop

SETTINGS = {"batch_size": "256", "max_steps": "12", "checkpoint_every": "4", "bottom_layers": "16", "top_layers": "16"}
DATA = {"data.sessions": "300"}
TASKS = (
    *("open-run", "generate-data", "profile-access", "plan-shards", "tune-ingest", "train-baseline", "train-model"),
    "report",
)


@pytest.fixture(scope="session")
def package(site: TestSite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(folder), "--image-tag", site.tag])
    assert outcome.exit_code == 0, outcome.output
    return folder / "recmill.yaml"


@pytest.fixture(scope="session")
def finished(site: TestSite, package: Path) -> PipelineRun:
    arguments = {"workdir": "/runs/one", "settings": json.dumps(SETTINGS | DATA)}
    run = PipelineRun.load(package, site=site, run_id="r1", arguments=arguments)
    for task in TASKS:
        run.run(task)
    return run


def test_every_step_runs_as_a_pod_and_passes_its_folder_on(site: TestSite, finished: PipelineRun) -> None:
    said = site.shell("look", "ls /runs/one /runs/one/steps; cat /runs/one/train/result.json")
    listing, _, result = said.partition("{")
    for name in ("dataset", "profile", "plan", "allocation", "train", "model", "report.html", "run.json"):
        assert name in listing.split()
    assert {f"{task.replace('-', '_')}.json" for task in TASKS} <= set(listing.split())
    trained = json.loads("{" + result)
    assert trained["num_steps"] == 12
    assert finished.artifacts["train-model"]["model"]["metadata"]["path"] == "/runs/one/train/checkpoint"


def test_steps_have_no_root_and_a_read_only_root_file_system(site: TestSite, finished: PipelineRun) -> None:
    for task in TASKS:
        (pod,) = site.cluster.pods(f"job-name={task}-r1", namespace=site.namespace)
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["serviceAccountName"] == "recmill-runner"
        assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0


def test_mlflow_in_the_cluster_holds_the_run_its_steps_and_the_model(site: TestSite, finished: PipelineRun) -> None:
    finished.close("COMPLETE")
    runs = tracked(site, "r1")
    (parent,) = [run for run in runs if run["parent"] is None]
    assert parent["status"] == "FINISHED"
    assert parent["metrics"]["auc"] > 0
    steps = {run["name"]: run["status"] for run in runs if run["parent"] == parent["id"]}
    assert steps == {task.replace("-", "_"): "FINISHED" for task in TASKS}
    assert parent["models"] == ["recmill-dlrm"]


def test_a_failed_run_is_failed_in_mlflow_with_its_reason(site: TestSite, package: Path) -> None:
    run = PipelineRun.load(
        package,
        site=site,
        run_id="r2",
        arguments={"workdir": "/runs/two", "preset": "parquet", "data": "/runs/nothing"},
    )
    name = run.start("generate-data")
    with pytest.raises(AssertionError, match="/runs/nothing"):
        site.cluster.finish_job(name, namespace=site.namespace)
    run.close("FAILED")
    (parent,) = [entry for entry in tracked(site, "r2") if entry["parent"] is None]
    assert parent["status"] == "FAILED"
    assert "/runs/nothing" in parent["tags"]["recmill.failure"]


def test_a_repeated_step_reuses_its_finished_work(site: TestSite, finished: PipelineRun) -> None:
    before = finished.artifacts["train-model"]["model"]["metadata"]["content_hash"]
    finished.run("train-model")
    assert finished.artifacts["train-model"]["model"]["metadata"]["content_hash"] == before


def tracked(site: TestSite, run_id: str) -> list[dict[str, Any]]:
    """All MLflow runs of a pipeline run, read in the cluster with the login that steps have."""
    script = f"""
import json, mlflow
client = mlflow.MlflowClient('http://mlflow:5000')
experiment = client.get_experiment_by_name('recmill').experiment_id
found = client.search_runs([experiment], "tags.`kfp.pipeline_run_id` = '{run_id}'")
models = [model.name for model in client.search_registered_models()]
print('RUNS ' + json.dumps([dict(id=r.info.run_id, name=r.info.run_name, status=r.info.status, metrics=r.data.metrics,
    tags=r.data.tags, parent=r.data.tags.get('mlflow.parentRunId'), models=models) for r in found]))
"""
    logins = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": "recmill-mlflow", "key": name}}}
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    ]
    name = f"tracked-{run_id}"
    container = {"image": site.image("trainer"), "command": ["python3", "-c", script], "env": logins}
    site.cluster.delete("job", name, namespace=site.namespace)
    site.cluster.apply(site.job(name, container), namespace=site.namespace)
    site.cluster.finish_job(name, namespace=site.namespace)
    (pod,) = site.cluster.pods(f"job-name={name}", namespace=site.namespace)
    said = site.cluster.logs(pod["metadata"]["name"], namespace=site.namespace)
    (line,) = [text for text in said.splitlines() if text.startswith("RUNS ")]
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RUNS "))
    return found


def test_a_log_yaml_is_prepared_in_a_step_of_its_own(site: TestSite, tmp_path: Path) -> None:
    """And the model that is trained on it goes on training from its checkpoint."""
    log = Shop.random(3, 60).write(tmp_path / "shop", Options())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(log.parent, arcname="shop")
    text = base64.b64encode(packed.getvalue()).decode()
    data = f"/runs/shop/{log.name}"
    site.shell("shop-data", f"echo {text} | base64 -d | tar -xz -C /runs")
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path), "--image-tag", site.tag, "--data", data])
    assert outcome.exit_code == 0, outcome.output
    arguments = {"workdir": "/runs/shop-run", "settings": json.dumps(SETTINGS)}
    run = PipelineRun.load(tmp_path / "recmill.yaml", site=site, run_id="shop", arguments=arguments)
    for task in ("open-run", "prepare-log", "generate-data"):
        run.run(task)
    assert run.artifacts["prepare-log"]["raw_log"]["metadata"]["path"] == "/runs/shop-run/raw"
    assert "vocabulary" in site.shell("shop-look", "ls /runs/shop-run/raw /runs/shop-run/dataset")
    small = "--set batch_size=64 --set bottom_layers=16 --set top_layers=16 --set max_steps=4 --set threads=1"
    site.shell(
        "shop-train",
        f"cd /runs/shop-run; recmill train dataset --out first --json {small}\n"
        "recmill train dataset --from first/checkpoint --out second --json --set threads=1 --set epochs=2\n"
        "find second/checkpoint -name '*.safetensors' | grep -q rank",
    )
