"""The TrainJob of a training on several nodes, and how its pods' ends are told. With a real cluster: tests/cluster."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from components.memory import describe_limit, explain_memory_limit, num_kills
from components.placement import ClusterPlacement
from components.train_model.pods import describe_failure, find_obstacle, is_out_of_memory
from components.train_model.train_job import exit_on_sigterm, finished, make_train_job
from recmill.training.config import TrainConfig
from recmill.training.processes import rank_environment
from recmill.training.trainer import TrainingFailed

OUT = Path("/runs/one/train")


def manifest(placement: ClusterPlacement | None = None, **settings: Any) -> dict[str, Any]:
    placement = placement or ClusterPlacement(image="recmill/trainer:t1")
    job = {"config": TrainConfig(**settings).to_json()}
    return make_train_job(job, OUT, num_nodes=4, num_local=2, placement=placement)


def test_a_train_job_runs_the_agent_on_every_node() -> None:
    trainer = manifest()["spec"]["trainer"]
    assert trainer["image"] == "recmill/trainer:t1"
    assert trainer["numNodes"] == 4
    assert [*trainer["command"], *trainer["args"]] == [
        "python3",
        "-m",
        "components.train_model.agent",
        "--nproc-per-node",
        "2",
        "/runs/one/train/launch/job.json",
    ]
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "2", "memory": "6Gi"}


def test_ranks_in_pods_have_the_environment_of_ranks_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    env = {entry["name"]: entry["value"] for entry in manifest(threads=3)["spec"]["trainer"]["env"]}
    assert env.items() <= rank_environment(3).items()
    assert (env["OMP_NUM_THREADS"], env["GOMP_SPINCOUNT"]) == ("3", "7")
    assert {"MIMALLOC_PURGE_DELAY", "PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL"} <= set(env)
    default = manifest()["spec"]["trainer"]["env"]
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in default  # two cores per pod, two ranks


def test_the_pods_get_the_volume_and_no_rights() -> None:
    (patch,) = manifest()["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]
    assert job["name"] == "node"
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
    assert pod["spec"]["serviceAccountName"] == "recmill-worker"
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    (container,) = pod["spec"]["containers"]
    # The API lets patches of the container `node` set these, and its environment only through `trainer`.
    assert set(container) == {"name", "volumeMounts", "securityContext"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/tmp", "/dev/shm"}


def test_gpus_nodes_and_taints_of_the_placement_reach_the_pods() -> None:
    placement = ClusterPlacement.from_body(
        {
            "image": "i:1",
            "steps": {"train_model": {"gpus": 8, "node_selector": {"pool": "gpu"}, "tolerations": [{"key": "gpu"}]}},
        },
        where="test",
    )
    spec = manifest(placement)["spec"]
    assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    pod = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = pod["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_a_step_started_again_finds_the_train_job_of_its_folder() -> None:
    name = manifest()["metadata"]["name"]
    assert name == manifest(batch_size=7)["metadata"]["name"]
    assert name == f"recmill-{hashlib.sha256(b'/runs/one/train').hexdigest()[:12]}"


def test_a_train_job_is_found_by_its_run_and_ends_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pipeline/runid" not in manifest()["metadata"]["labels"]
    monkeypatch.setenv("KFP_RUN_ID", "r1")
    made = manifest()
    assert made["metadata"]["labels"]["pipeline/runid"] == "r1"
    assert made["spec"]["activeDeadlineSeconds"] == 24 * 3600


def test_a_train_job_has_ended_when_a_condition_says_so() -> None:
    assert finished({}) is None
    assert finished({"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}) is None
    failed = {"type": "Failed", "status": "True", "message": "jobset failed"}
    assert finished({"status": {"conditions": [failed]}}) == ("Failed", "jobset failed")
    assert finished({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}) == ("Complete", "Complete")


def test_sigterm_ends_the_wait_so_that_the_train_job_is_removed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, exit_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def pod(name: str, state: dict[str, Any], *, conditions: list[Any] | None = None, reason: str | None = None) -> Any:
    status = client.V1ContainerStatus(
        name="node",
        image="i",
        image_id="i",
        ready=False,
        restart_count=0,
        state=client.V1ContainerState(**state),
    )
    limits = client.V1ResourceRequirements(limits={"memory": "2Gi"})
    return client.V1Pod(
        metadata=client.V1ObjectMeta(name=name),
        spec=client.V1PodSpec(containers=[client.V1Container(name="node", resources=limits)]),
        status=client.V1PodStatus(container_statuses=[status], conditions=conditions, reason=reason),
    )


def ended(code: int, reason: str) -> dict[str, Any]:
    return {"terminated": client.V1ContainerStateTerminated(exit_code=code, reason=reason)}


def test_the_pod_that_was_killed_is_named_before_those_that_lost_it() -> None:
    pods = [pod("a", ended(1, "Error")), pod("b", ended(137, "OOMKilled")), pod("c", ended(0, "Completed"))]
    assert describe_failure(pods).startswith(
        "pod b was killed at its memory limit of 2Gi (OOMKilled); give train_model"
    )
    assert describe_failure(pods[:1]) == "pod a ended with exit code 1 (Error)"
    assert describe_failure(pods[2:]) == ""
    assert (is_out_of_memory(pods), is_out_of_memory(pods[:1])) == (True, False)


def test_a_pod_that_left_its_node_is_lost() -> None:
    assert describe_failure([pod("a", {}, reason="Evicted")]) == "pod a was lost: Evicted"


def test_a_pod_that_cannot_start_says_why() -> None:
    waiting = client.V1ContainerStateWaiting(reason="ErrImagePull", message="no such tag")
    found = find_obstacle([pod("a", {"waiting": waiting})])
    assert found is not None
    assert (found.reason, found.may_pass) == ("pod a cannot start (image i): ErrImagePull: no such tag", False)
    starting = client.V1ContainerStateWaiting(reason="ContainerCreating")
    assert find_obstacle([pod("a", {"waiting": starting})]) is None
    full = client.V1PodCondition(type="PodScheduled", status="False", message="0/3 nodes are available")
    found = find_obstacle([pod("a", {}, conditions=[full])])
    assert found is not None
    assert (found.reason, found.may_pass) == ("pod a cannot be scheduled: 0/3 nodes are available", True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_rank_killed_for_memory_is_told_as_that(tmp_path: Path, version: int) -> None:
    events = {2: "memory.events", 1: "memory/memory.oom_control"}[version]
    limit = {2: "memory.max", 1: "memory/memory.limit_in_bytes"}[version]
    (tmp_path / "memory").mkdir()
    (tmp_path / events).write_text("oom_kill 3\n")
    (tmp_path / limit).write_text("2000000000\n")

    def train_and_die() -> None:
        (tmp_path / events).write_text("oom_kill 4\n")
        raise TrainingFailed("rank 0 exited without a report")

    with (
        pytest.raises(TrainingFailed, match=r"memory limit of 1.86 GiB;.*rank 0 exited"),
        explain_memory_limit(tmp_path),
    ):
        train_and_die()
    assert num_kills(tmp_path) == 4


def test_other_failures_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"^rank 1 failed$"), explain_memory_limit(tmp_path):
        raise TrainingFailed("rank 1 failed")
    assert num_kills(tmp_path) == 0
    assert describe_limit(tmp_path) == "unknown size"
