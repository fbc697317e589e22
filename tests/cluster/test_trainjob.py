"""train_model on two nodes with the real Kubeflow Trainer: the step creates a TrainJob, follows and deletes it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from components.train_model.train_job import JOB_LABEL
from pipelines.commands import compile_pipeline
from tests.cluster.deployment import TestSite
from tests.cluster.kube import wait_until
from tests.cluster.tasks import PipelineRun
from tests.cluster.trainings import SETTINGS, STEPS, losses, result_of, train_command

CHOSEN = ("tiers=true", "hot_batches=false")
HOT = ("tiers=true", "hot_batches=true", "max_steps=120")
KINDS = ("trainjobs", "jobsets", "jobs", "services", "configmaps")
SOON_S = 60  # by then a user reads why


@dataclass(kw_only=True)
class NodeTraining:
    """train_model of one run after another, each on two nodes with its own folder and placement."""

    site: TestSite
    package: Path
    paths: dict[str, str]  # of the step's inputs

    def start(self, run_id: str, *, settings: tuple[str, ...] = CHOSEN, plan: str = "plan", **placement: Any) -> str:
        """Start the step as a Job; `placement` changes that of train_model, or the image of its pods."""
        arguments = {
            "workdir": f"/runs/{run_id}",
            "num_nodes": 2,
            "start_from": "{}",
            "settings": json.dumps(dict(setting.split("=") for setting in (*SETTINGS, *settings))),
        }
        self.run = PipelineRun.load(self.package, site=self.site, run_id=run_id, arguments=arguments)
        inputs = self.run.find("train-model")["inputs"]  # as the steps before would have passed them on
        for name, source in inputs["parameters"].items():
            if made := source.get("taskOutputParameter"):
                outputs = self.run.parameters.setdefault(made["producerTask"], {})
                outputs[made["outputParameterKey"]] = arguments[name]
        for name, source in inputs["artifacts"].items():
            made = source["taskOutputArtifact"]
            outputs = self.run.artifacts.setdefault(made["producerTask"], {})
            path = self.paths[plan if name == "plan" else name]
            outputs[made["outputArtifactKey"]] = {"name": name, "metadata": {"path": path}}
        executor = self.run.spec["deploymentSpec"]["executors"]["exec-train-model"]["container"]
        (variable,) = [entry for entry in executor["env"] if entry["name"] == "RECMILL_PLACEMENT"]
        body = json.loads(variable["value"])
        body["image"] = placement.pop("image", body["image"])
        body["steps"] = {**body.get("steps", {}), "train_model": {**body["steps"]["train_model"], **placement}}
        variable["value"] = json.dumps(body)
        return self.run.start("train-model")

    def logs(self, name: str) -> str:
        pods = self.site.cluster.pods(f"job-name={name}", namespace=self.site.namespace)
        return "".join(self.site.cluster.logs(pod["metadata"]["name"], namespace=self.site.namespace) for pod in pods)

    def fail(self, name: str) -> str:
        with pytest.raises(AssertionError) as failed:
            self.site.cluster.finish_job(name, namespace=self.site.namespace, timeout_s=300)
        return str(failed.value)

    def train_jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.site.cluster.get("trainjobs", namespace=self.site.namespace)["items"]
        return found

    def trainer_pods(self) -> list[dict[str, Any]]:
        return self.site.cluster.pods(JOB_LABEL, namespace=self.site.namespace)

    def leftovers(self) -> list[str]:
        """Everything that belongs to a TrainJob, and folders that only its ranks need."""
        names = []
        for kind in KINDS:
            items = self.site.cluster.get(kind, namespace=self.site.namespace)["items"]
            names += [f"{kind}/{item['metadata']['name']}" for item in items if self._is_ours(item)]
        return names + [pod["metadata"]["name"] for pod in self.trainer_pods()]

    @staticmethod
    def _is_ours(item: dict[str, Any]) -> bool:
        return item["kind"] == "TrainJob" or any(
            owner["kind"] in ("TrainJob", "JobSet") for owner in item["metadata"].get("ownerReferences", [])
        )

    def assert_clean(self, *, timeout_s: float = 60) -> None:
        wait_until(
            lambda: not self.leftovers(),
            timeout_s=timeout_s,
            what="nothing is left",
            describe=lambda: str(self.leftovers()),
        )


@pytest.fixture(scope="module")
def nodes(site: TestSite, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> NodeTraining:
    if site.cluster.run("get", "crd", "trainjobs.trainer.kubeflow.org", check=False).returncode:
        pytest.skip("this cluster has no Kubeflow Trainer")
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "placement.yml").write_text("steps: {train_model: {cpu: '1', memory: 1500Mi}}")
    args = ["--out", str(folder), "--image-tag", site.tag, "--placement", str(folder / "placement.yml")]
    outcome = CliRunner().invoke(compile_pipeline, args)
    assert outcome.exit_code == 0, outcome.output
    work = dataset.removesuffix("/dataset")
    site.shell(
        "nodes-data",
        f"cd {work}; printf 'nodes: 2\\nranks_per_node: 1\\n' > /tmp/topology.yml\n"
        "recmill profile dataset --out profile --json\n"
        'plan="recmill plan profile --topology /tmp/topology.yml --memory-budget 1MiB --batch-size 256 --json"\n'
        "$plan --out plan; $plan --hot-budget 256KiB --out hot_plan\n"
        "recmill tune dataset --seconds 2 --out allocation --json",
    )
    return NodeTraining(
        site=site,
        package=folder / "recmill.yaml",
        paths={name: f"{work}/{name}" for name in ("dataset", "plan", "hot_plan", "allocation")},
    )


@pytest.fixture(scope="module")
def undisturbed(site: TestSite, dataset: str, nodes: NodeTraining) -> list[float]:
    """Losses of the same two ranks in one pod, without Kubeflow."""
    flags = (f"--plan {nodes.paths['plan']}", f"--allocation {nodes.paths['allocation']}", "--nproc 2")
    site.shell("undisturbed", " ".join((train_command(dataset, "/runs/training/two", *CHOSEN), *flags)))
    return losses(result_of(site, "undisturbed-result", "/runs/training/two"))


def test_two_nodes_train_like_one_process_and_show_their_progress(
    site: TestSite, nodes: NodeTraining, undisturbed: list[float], alone: dict[str, Any]
) -> None:
    name = nodes.start("pair")
    seen: list[dict[str, Any]] = []

    def look() -> bool:
        states = [job.get("status", {}) for job in nodes.train_jobs()]
        seen.extend(state["trainerStatus"] for state in states if "trainerStatus" in state)
        return site.cluster.ended(name, site.namespace) is not None

    wait_until(look, timeout_s=400, what="the training", describe=lambda: nodes.logs(name), every_s=0.5)
    site.cluster.finish_job(name, namespace=site.namespace)
    nodes.assert_clean()
    result = result_of(site, "pair-result", "/runs/pair/train")
    assert (result["world_size"], result["num_steps"]) == (2, STEPS)
    assert losses(result) == undisturbed
    # Sums over two ranks round differently, and the difference grows tenfold every fifty steps on memorised rows.
    assert losses(result)[:100] == pytest.approx(losses(alone)[:100], rel=1e-4)
    assert "[train_model] train step" in nodes.logs(name)
    assert "launch" not in site.shell("pair-look", "ls /runs/pair/train /runs/pair/model")
    assert seen, "no progress reached the TrainJob's status"
    percentages = [status["progressPercentage"] for status in seen]
    assert percentages == sorted(percentages)
    assert 0 < percentages[-1] <= 100
    assert {metric["name"] for metric in seen[-1]["metrics"]} == {"step", "num_steps", "loss"}
    first = {metric["name"]: float(metric["value"]) for metric in seen[0]["metrics"]}
    assert first["loss"] == pytest.approx(undisturbed[int(first["step"]) - 1], rel=1e-4)


def test_two_nodes_train_hot_batches_like_two_ranks_in_one_pod(
    site: TestSite, dataset: str, nodes: NodeTraining
) -> None:
    flags = (f"--plan {nodes.paths['hot_plan']}", f"--allocation {nodes.paths['allocation']}", "--nproc 2")
    site.shell("hot", " ".join((train_command(dataset, "/runs/training/hot", *HOT), *flags)))
    here = result_of(site, "hot-result", "/runs/training/hot")
    assert here["hot"]["batches"]["hot"] > 0
    assert here["hot"]["batches"]["cold"] > 0
    site.cluster.finish_job(
        nodes.start("hot-pair", settings=HOT, plan="hot_plan"), namespace=site.namespace, timeout_s=400
    )
    nodes.assert_clean()
    there = result_of(site, "hot-pair-result", "/runs/hot-pair/train")
    assert there["world_size"] == 2
    assert losses(there) == losses(here)
    assert there["hot"] == here["hot"]
    assert there["metrics"]["auc"] == here["metrics"]["auc"]


def test_a_deleted_pod_resumes_with_the_same_losses(
    site: TestSite, nodes: NodeTraining, undisturbed: list[float]
) -> None:
    name = nodes.start("disturbed")

    def first_checkpoint() -> str:
        running = [pod["metadata"]["name"] for pod in nodes.trainer_pods() if pod["status"]["phase"] == "Running"]
        if len(running) < 2:
            return ""
        look = site.cluster.run(
            *("exec", running[1], "--namespace", site.namespace, "--", "ls", "/runs/disturbed/train/checkpoints"),
            check=False,
        )
        return running[1] if "step-" in look.stdout else ""

    victim = wait_until(
        first_checkpoint, timeout_s=300, what="the first checkpoint", describe=lambda: nodes.logs(name), every_s=0.2
    )
    site.cluster.run("delete", "pod", victim, "--namespace", site.namespace, "--grace-period=0", "--force")
    site.cluster.finish_job(name, namespace=site.namespace, timeout_s=400)
    nodes.assert_clean()
    result = result_of(site, "disturbed-result", "/runs/disturbed/train")
    assert losses(result) == undisturbed
    assert result["usage"]["num_steps"] < STEPS  # of the last start: it did not begin anew


@pytest.mark.parametrize(
    ("run_id", "placement", "said"),
    [
        (
            "narrow",
            {"memory": "250Mi", "memory_request": "200Mi"},
            "was killed at its memory limit of 250Mi (OOMKilled)",
        ),
        ("imageless", {"image": "recmill/trainer:none"}, "cannot start (image"),
    ],
)
def test_a_training_that_cannot_succeed_ends_soon_and_says_why(
    nodes: NodeTraining, run_id: str, placement: dict[str, Any], said: str
) -> None:
    name = nodes.start(run_id, **placement)
    hopeless: Callable[[], bool] = lambda: any(is_hopeless(pod) for pod in nodes.trainer_pods())  # noqa: E731
    wait_until(hopeless, timeout_s=200, what="a pod that fails", describe=lambda: nodes.logs(name), every_s=0.5)
    begin = time.monotonic()
    assert said in nodes.fail(name)
    assert time.monotonic() - begin < SOON_S + 30  # with the removal of the TrainJob
    nodes.assert_clean()


def is_hopeless(pod: dict[str, Any]) -> bool:
    for status in pod["status"].get("containerStatuses", []):
        ended = status["state"].get("terminated") or status.get("lastState", {}).get("terminated")
        if ended or "Pull" in status["state"].get("waiting", {}).get("reason", ""):
            return True
    return False


@pytest.mark.parametrize(
    ("run_id", "placement", "said"),
    [
        ("homeless", {"node_selector": {"pool": "none"}}, "cannot be scheduled: 0/1 nodes are available"),
        ("greedy", {"cpu": "9", "cpu_request": "9"}, "exceeded quota"),
    ],
)
def test_pods_without_room_are_explained_while_they_wait_and_gone_after_termination(
    nodes: NodeTraining, run_id: str, placement: dict[str, Any], said: str
) -> None:
    name = nodes.start(run_id, **placement)
    wait_until(nodes.train_jobs, timeout_s=200, what="the TrainJob", describe=lambda: nodes.logs(name))
    waiting = wait_until(
        lambda: [line for line in nodes.logs(name).splitlines() if "waiting: " in line],
        timeout_s=SOON_S,
        what="an explanation",
        describe=lambda: nodes.logs(name),
    )
    assert said in waiting[0]
    # Terminated by the user: Kubeflow kills the step's pod, which may not hear of it in time, and runs close_run.
    nodes.site.cluster.delete("job", name, namespace=nodes.site.namespace)
    nodes.run.close("RUNNING")
    nodes.assert_clean()
