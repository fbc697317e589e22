"""Where steps run on a cluster: what a placement file may say, and what of it reaches the compiled pipeline."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kfp import dsl

from components.images import IMAGES
from components.placement import LAPTOP, PLACED_LIKE, PROFILES, ClusterPlacement, quantity
from pipelines.ablations import VARIANTS
from pipelines.commands import PIPELINES, compile_pipeline
from recmill.artifacts import InputError
from recmill.training.config import TrainConfig


def compiled(folder: Path, *args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(folder), *args], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    (path,) = folder.glob("*.yaml")
    pipeline, platform = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return pipeline, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def placed(folder: Path, text: str, *args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    file = folder / "placement.yml"
    file.write_text(text)
    return compiled(folder, "--placement", str(file), *args)


@pytest.mark.parametrize("kind", PIPELINES)
def test_no_task_of_any_pipeline_is_root_or_without_limits(tmp_path: Path, kind: str) -> None:
    spec, on_cluster = compiled(tmp_path, "--pipeline", kind)
    for name, executor in spec["deploymentSpec"]["executors"].items():
        assert on_cluster[name]["securityContext"] == {
            "runAsUser": "10001",
            "runAsGroup": "10001",
            "runAsNonRoot": True,
        }
        resources = executor["container"]["resources"]
        for kind in ("Memory", "Cpu"):
            request, limit = (quantity(resources[f"resource{kind}{bound}"]) for bound in ("Request", "Limit"))
            assert 0 < request <= limit
        assert int(on_cluster[name]["activeDeadlineSeconds"]) > 0
        assert ":latest" not in executor["container"]["image"]


@pytest.mark.parametrize("kind", PIPELINES)
def test_credentials_come_from_a_secret_that_is_only_named(tmp_path: Path, kind: str) -> None:
    spec, on_cluster = compiled(tmp_path, "--pipeline", kind)
    for given in on_cluster.values():
        (secret,) = given["secretAsEnv"]
        assert secret["secretNameParameter"]["runtimeValue"]["constant"] == "recmill-mlflow"
        assert {key["envVar"] for key in secret["keyToEnv"]} == {
            "RECMILL_TRACKING_USERNAME",
            "RECMILL_TRACKING_PASSWORD",
        }
    for executor in spec["deploymentSpec"]["executors"].values():
        names = {entry["name"] for entry in executor["container"].get("env", [])}
        assert names <= {"RECMILL_TRACKING_URI", "RECMILL_PLACEMENT"}
    text = next(tmp_path.glob("*.yaml")).read_text(encoding="utf-8")
    assert not re.search(r"(password|token)\s*[:=]\s*['\"]?[A-Za-z0-9]{6,}", text, re.IGNORECASE)


def test_whatever_ends_the_steps_the_mlflow_run_is_closed_with_the_final_status(tmp_path: Path) -> None:
    spec, _ = compiled(tmp_path)
    closing = spec["root"]["dag"]["tasks"]["close-run"]
    assert closing["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert closing["inputs"]["parameters"]["status"]["taskFinalStatus"] == {"producerTask": "exit-handler-1"}
    assert closing["cachingOptions"] == {}  # off: a status is never the one of another run


def test_steps_are_tried_again_with_growing_pauses(tmp_path: Path) -> None:
    spec, _ = compiled(tmp_path)
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert all(task["retryPolicy"]["backoffFactor"] == 2.0 for task in tasks.values())
    assert tasks["train-model"]["retryPolicy"]["maxRetryCount"] == 3
    assert tasks["train-model"]["retryPolicy"]["backoffDuration"] == "30s"
    uncached = [name for name, task in tasks.items() if task["cachingOptions"] != {"enableCache": True}]
    assert uncached == ["open-run"]  # so that a run without a folder gets one of its own


def test_another_tag_is_another_cache_key_for_every_step(tmp_path: Path) -> None:
    """Kubeflow's key holds the name of the image; the tag names its content."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, _ = compiled(tmp_path / "a", "--image-tag", "a1")
    second, _ = compiled(tmp_path / "b", "--image-tag", "b2")
    for name, executor in first["deploymentSpec"]["executors"].items():
        assert executor["container"]["image"] != second["deploymentSpec"]["executors"][name]["container"]["image"]


def test_a_placement_reaches_the_training_step(tmp_path: Path) -> None:
    spec, on_cluster = placed(
        tmp_path,
        """
        claim: fast-volume
        steps:
          train_model:
            cpu: "16"
            memory: 128Gi
            gpus: 4
            shm: 16Gi
            node_selector: {pool: gpu}
            tolerations: [{key: nvidia.com/gpu}, {key: team, value: ads, effect: NoExecute}]
            timeout_s: 7200
            retries: 5
        """,
        "--image-tag",
        "t7",
    )
    container = spec["deploymentSpec"]["executors"]["exec-train-model"]["container"]
    assert container["image"] == "recmill/trainer:t7-cuda"
    assert container["resources"]["accelerator"] == {
        "resourceType": "nvidia.com/gpu",
        "resourceCount": "4",
        "type": "nvidia.com/gpu",
        "count": "4",
    }
    assert container["resources"]["resourceMemoryLimit"] == "128Gi"
    given = on_cluster["exec-train-model"]
    assert given["nodeSelector"] == {"labels": {"pool": "gpu"}}
    assert given["tolerations"] == [
        {"effect": "NoSchedule", "key": "nvidia.com/gpu", "operator": "Exists"},
        {"effect": "NoExecute", "key": "team", "operator": "Equal", "value": "ads"},
    ]
    assert given["emptyDirMounts"] == [
        {"medium": "Memory", "mountPath": "/dev/shm", "sizeLimit": "16Gi", "volumeName": "shm"}
    ]
    assert given["activeDeadlineSeconds"] == "7200"
    (volume,) = given["pvcMount"]
    assert (volume["constant"], volume["mountPath"]) == ("fast-volume", "/runs")
    other = spec["deploymentSpec"]["executors"]["exec-plan-shards"]["container"]
    assert other["image"] == "recmill/trainer:t7"  # a plan needs no GPU
    assert "accelerator" not in other["resources"]


def test_gpus_on_the_command_line_go_to_training_alone(tmp_path: Path) -> None:
    spec, _ = compiled(tmp_path, "--gpus", "2", "--gpu-type", "amd.com/gpu")
    containers = {name: entry["container"] for name, entry in spec["deploymentSpec"]["executors"].items()}
    with_gpus = {name for name, container in containers.items() if "accelerator" in container["resources"]}
    assert with_gpus == {"exec-train-baseline", "exec-train-model"}
    assert containers["exec-train-model"]["resources"]["accelerator"]["type"] == "amd.com/gpu"


def test_the_placement_travels_to_the_steps_that_start_pods(tmp_path: Path) -> None:
    spec, _ = placed(tmp_path, "mount: /data\nsteps: {train_model: {node_selector: {pool: big}}}")
    travelling = {}
    for name, executor in spec["deploymentSpec"]["executors"].items():
        variables = {entry["name"]: entry["value"] for entry in executor["container"]["env"]}
        if "RECMILL_PLACEMENT" in variables:
            travelling[name] = ClusterPlacement.from_body(json.loads(variables["RECMILL_PLACEMENT"]), where="test")
    assert set(travelling) == {"exec-generate-data", "exec-train-baseline", "exec-train-model"}
    there = travelling["exec-train-model"]
    assert (there.mount, there.image) == ("/data", "recmill/trainer:0.1.0")
    assert there.step("train_model").node_selector == {"pool": "big"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cliam: x", "has 'cliam', expected one of claim"),
        ("steps: {train: {}}", "steps has 'train', expected one of open_run, prepare_log, generate_data"),
        ("steps: {train_model: {gpu: 1}}", "steps.train_model: has 'gpu', expected one of cpu"),
        ("steps: {train_model: {cpu: 2}}", "steps.train_model: cpu is 2, expected a quantity"),
        ("steps: {train_model: {memory: lots}}", "memory is 'lots', expected a quantity"),
        ("steps: {train_model: {gpus: -1}}", "gpus is -1"),
        (
            "steps: {train_model: {cpu: '1', cpu_request: '2'}}",
            "cpu_request is 2, more than cpu, the limit, which is 1",
        ),
        ("profile: huge", "profile is 'huge', expected one of laptop, small, gpu"),
        ("steps: {train_model: {timeout_s: 0}}", "timeout_s is 0"),
        ("steps: {report: {tolerations: [{key: a, effect: Never}]}}", "effect is 'Never'"),
        ("- a", "expected a mapping"),
        ("a: [", "cannot be read as a placement"),
    ],
)
def test_a_wrong_placement_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "placement.yml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(says)):
        ClusterPlacement.load(file)


def test_a_placement_survives_its_journey() -> None:
    placement = ClusterPlacement(image="i:1").with_step("train_model", gpus=1, node_selector={"a": "b"})
    assert ClusterPlacement.from_body(json.loads(placement.to_json()), where="test").to_json() == placement.to_json()


def test_every_step_has_an_image_and_a_default_placement() -> None:
    assert set(IMAGES) == {*LAPTOP, *PLACED_LIKE}
    assert all(set(steps) == set(LAPTOP) for steps in PROFILES.values())


def test_trainings_that_are_compared_get_the_same_resources() -> None:
    placement = ClusterPlacement().with_step("train_model", cpu="16", memory="128Gi")
    for step in ("train_baseline", "train_shared"):
        assert placement.step(step) == placement.step("train_model")


def assert_folders_differ(task: dict) -> None:
    """The folder of a loop's task is the field `name` of its item."""
    folder = task["inputs"]["parameters"]["subfolder"]
    assert folder["componentInputParameter"].endswith("loop-item")
    assert folder["parameterExpressionSelector"] == 'parseJson(string_value)["name"]'


def test_the_graph_shows_the_ablations_side_by_side(tmp_path: Path) -> None:
    spec, _ = compiled(tmp_path, "--pipeline", "ablations")
    (loop,) = [name for name in spec["components"] if name.startswith("comp-for-loop")]
    assert set(spec["components"][loop]["dag"]["tasks"]) == {"train-model"}
    assert_folders_differ(spec["components"][loop]["dag"]["tasks"]["train-model"])
    default = spec["root"]["inputDefinitions"]["parameters"]["ablations"]["defaultValue"]
    assert default == VARIANTS
    outer = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert "for-loop" in " ".join(outer["compare-runs"]["dependentTasks"])


def test_the_ablations_are_the_baseline_each_switch_alone_and_all() -> None:
    for variant in VARIANTS:
        TrainConfig.from_overrides(variant["settings"])
    on = {
        variant["name"]: {key for key, value in variant["settings"].items() if value == "auto"} for variant in VARIANTS
    }
    switches = {"dedup", "tiers", "hot_batches", "sharing", "tuning"}
    assert on == {"baseline": set(), **{f"+{name}": {name} for name in switches}, "all": switches}


def test_the_graph_shows_the_partitions_side_by_side(tmp_path: Path) -> None:
    spec, _ = compiled(tmp_path, "--pipeline", "partitions")
    (loop,) = [name for name in spec["components"] if name.startswith("comp-for-loop")]
    assert set(spec["components"][loop]["dag"]["tasks"]) == {"generate-data"}
    assert_folders_differ(spec["components"][loop]["dag"]["tasks"]["generate-data"])
    outer = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert {"merge-data", "train-model", "report"} <= set(outer)


def test_kubeflows_task_config_still_lacks_what_started_pods_need() -> None:
    """docs/kubernetes.md says why RECMILL_PLACEMENT exists; if this fails, TaskConfig may replace more of it."""
    carried = {field.name for field in fields(dsl.TaskConfig)}
    assert carried == {"affinity", "tolerations", "node_selector", "env", "volumes", "volume_mounts", "resources"}
    missing = {"worker_account", "image", "executors"}
    assert missing <= {field.name for field in fields(ClusterPlacement)}
    pod = ClusterPlacement().worker_pod()
    assert pod["metadata"]["labels"]
    assert pod["spec"]["securityContext"]["fsGroup"] == 10001
    (shm,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert "emptyDir" in shm  # which Kubeflow's driver does not pass on
