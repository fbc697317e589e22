"""train_model on several nodes: the step's own pod creates a TrainJob, follows it and deletes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipelines.commands import compile_pipeline
from tests.cluster.deployment import TestSite
from tests.cluster.tasks import PipelineRun
from tests.cluster.trainer import TrainerController

CRD = Path(__file__).parent / "trainjob-crd.yaml"
SETTINGS = {"batch_size": "256", "max_steps": "8", "bottom_layers": "16", "top_layers": "16", "threads": "1"}
BEFORE = ("generate-data", "profile-access", "plan-shards", "tune-ingest")


@pytest.fixture(scope="session")
def trainer(site: TestSite) -> Iterator[TrainerController]:
    found = site.cluster.run("get", "crd", "trainjobs.trainer.kubeflow.org", check=False)
    if found.returncode:
        site.cluster.apply(yaml.safe_load(CRD.read_text(encoding="utf-8")))
        site.cluster.run("wait", "--for=condition=established", "crd/trainjobs.trainer.kubeflow.org", "--timeout=60s")
    with TrainerController(site.cluster, site.namespace) as controller:
        yield controller


@pytest.fixture(scope="session")
def prepared(site: TestSite, tmp_path_factory: pytest.TempPathFactory) -> PipelineRun:
    """A run on two nodes up to the training step."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "placement.yml").write_text("steps: {train_model: {cpu: '1', memory: 1500Mi}}")
    args = ["--out", str(folder), "--image-tag", site.tag, "--placement", str(folder / "placement.yml")]
    outcome = CliRunner().invoke(compile_pipeline, args)
    assert outcome.exit_code == 0, outcome.output
    arguments = {
        "workdir": "/runs/nodes",
        "num_nodes": 2,
        "settings": json.dumps(SETTINGS | {"data.sessions": "300"}),
    }
    run = PipelineRun.load(folder / "recmill.yaml", site=site, run_id="n1", arguments=arguments)
    for task in BEFORE:
        run.run(task)
    return run


def test_two_nodes_train_and_the_trainjob_is_gone(
    site: TestSite, prepared: PipelineRun, trainer: TrainerController
) -> None:
    prepared.run("train-model", timeout_s=400)
    said = site.shell("nodes-look", "cat /runs/nodes/train/result.json")
    result = json.loads(said)
    assert (result["world_size"], result["num_steps"]) == (2, 8)
    (job,) = trainer.seen
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert site.cluster.get("trainjobs", namespace=site.namespace)["items"] == []
    name = f"train-model-{prepared.run_id}"
    (pod,) = site.cluster.pods(f"job-name={name}", namespace=site.namespace)
    assert "[train_model] train" in site.cluster.logs(pod["metadata"]["name"], namespace=site.namespace)


def test_a_pod_at_its_memory_limit_fails_the_step_with_that_reason(
    site: TestSite, prepared: PipelineRun, trainer: TrainerController
) -> None:
    executor = prepared.spec["deploymentSpec"]["executors"]["exec-train-model"]["container"]
    (variable,) = [entry for entry in executor["env"] if entry["name"] == "RECMILL_PLACEMENT"]
    before, workdir = variable["value"], prepared.arguments["workdir"]
    narrow = json.loads(before)
    narrow["steps"]["train_model"]["memory"] = "250Mi"
    variable["value"] = json.dumps(narrow)
    prepared.arguments["workdir"] = "/runs/narrow"
    try:
        name = prepared.start("train-model")
        with pytest.raises(AssertionError) as failed:
            site.cluster.finish_job(name, namespace=site.namespace, timeout_s=300)
    finally:
        variable["value"], prepared.arguments["workdir"] = before, workdir
    assert "was killed at its memory limit of 250Mi (OOMKilled)" in str(failed.value)
    assert site.cluster.get("trainjobs", namespace=site.namespace)["items"] == []
