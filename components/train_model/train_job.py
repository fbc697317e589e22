"""Training on several nodes: the ranks run in pods of a Kubeflow Trainer TrainJob, followed from the step's own pod.

    step's pod: train()                        pods of the TrainJob, one per node
    writes OUT/launch/job.json           ->    torchrun reads it, ranks meet over the TrainJob's headless Service
    follows logs and conditions          <-    rank 0 writes OUT/result.json and the checkpoints

All pods mount the volume that holds OUT. The TrainJob starts lost pods and failed containers again, and the ranks then
resume from the newest checkpoint. It ends early where another attempt would fail alike: a rank that reports an error of
its own, or a pod that was killed at its memory limit. Whatever ends it, the same call again resumes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.placement import ClusterPlacement
from components.train_model.pods import (
    Obstacle,
    describe_failure,
    find_obstacle,
    find_refusal,
    follow_log,
    is_out_of_memory,
)
from recmill.artifacts import InputError, dump_json, write_text_atomically
from recmill.progress import Progress, no_progress
from recmill.training.processes import rank_variables
from recmill.training.trainer import JOB, TrainingFailed, rank_arguments, rank_failure

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUNTIME = "torch-distributed"  # comes with Kubeflow Trainer
MANAGER = "recmill/train-model"  # owner of our runtimePatches
JOB_LABEL = "jobset.sigs.k8s.io/jobset-name"
RUN_LABEL = "pipeline/runid"  # as Kubeflow Pipelines labels the pods of a run
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # such pods may reach the status server
AGENT = "components.train_model.agent"
POLL_S = 2.0
TELL_S = 10.0  # pods that have not started after this time are worth a line
STUCK_S = 45.0  # a pod that cannot start (no such image, no such secret) for this long will not start at all
FULL_S = 300.0  # as long as nodes or quotas may take to make room
API_S = 300.0  # as long as the API server may be away
ADVICE = "if that stays so, lower cpu_request and memory_request of train_model in the placement, or num_nodes"
GONE_S = 60.0  # for pods to end after their TrainJob was deleted
# How a rank fails that lost its peer, or whose pod was deleted; it does better when both are back.
LOST_PEER = r"got signal: 15|onnect|[Ss]ocket|[Tt]imed out|[Tt]imeout|Broken pipe|NCCL|peer"
LOST_S = 3.0  # a pod killed at its memory limit is known by then, and says more than the ranks that lost it


def make_train_job(
    job: Mapping[str, Any], folder: Path, *, num_nodes: int, num_local: int, placement: ClusterPlacement
) -> dict[str, Any]:
    """The TrainJob of a run. Its name follows from the run's folder, so that a restarted step finds it."""
    step, run_id = placement.step("train_model"), os.environ.get("KFP_RUN_ID", "")
    variables = rank_variables(job["config"]["threads"] or max(1, step.cores // num_local))
    gpus = {placement.gpu_type: str(step.gpus)} if step.gpus else {}
    resources = {kind: amounts | gpus for kind, amounts in step.resources(num_local).items()}
    pod = placement.worker_pod()
    of_run = {RUN_LABEL: run_id} if run_id else {}
    pod["metadata"]["labels"] |= STEP_LABEL | of_run
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": f"recmill-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}",
            "labels": placement.labels("trainer") | of_run,
        },
        "spec": {
            "activeDeadlineSeconds": step.timeout_s,  # whoever follows it may be gone
            "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": RUNTIME},
            "trainer": {
                "image": placement.image,
                "numNodes": num_nodes,
                # torchrun, whom the runtime tells who is who: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR.
                "command": ["python3", "-m", AGENT],
                "args": rank_arguments(num_local, launch_folder(folder) / JOB),
                "env": [{"name": name, "value": value} for name, value in variables.items()],
                "resourcesPerNode": resources,
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patch}],
        },
    }


def launch_folder(folder: Path) -> Path:
    """Where the ranks find their job and leave reports of what went wrong."""
    return folder / "launch"


class TrainJobLauncher:
    """A launcher for `train()`: runs the ranks as one TrainJob, from its creation to its removal.

    `notice` is told in one sentence why pods do not start, while they may still do so.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        placement: ClusterPlacement,
        progress: Progress = no_progress,
        notice: Callable[[str], None] = print,
        poll_s: float = POLL_S,
        stuck_s: float = STUCK_S,
        full_s: float = FULL_S,
    ) -> None:
        self.num_nodes, self.placement, self.progress, self.notice = num_nodes, placement, progress, notice
        self.poll_s, self.stuck_s, self.full_s = poll_s, stuck_s, full_s
        self.followed: dict[tuple[str, int], threading.Thread] = {}  # (pod, how often its container was started again)

    def __call__(self, job: Mapping[str, Any], folder: Path, nproc: int) -> None:
        """Create the TrainJob (or join the one that an earlier attempt of this step left), wait, remove it."""
        from kubernetes import client

        num_local = nproc // self.num_nodes
        manifest = make_train_job(job, folder, num_nodes=self.num_nodes, num_local=num_local, placement=self.placement)
        self.folder, self.name = folder, str(manifest["metadata"]["name"])
        self.namespace = load_cluster_access()
        self.objects, self.core = client.CustomObjectsApi(), client.CoreV1Api()
        launch = launch_folder(folder)
        with exit_on_sigterm():
            try:
                launch.mkdir(exist_ok=True)
                for report in launch.glob("error-*.json"):
                    report.unlink()
                write_text_atomically(launch / JOB, dump_json(job))
                self.create(manifest)
                failure = self.wait()
            finally:
                self.delete()
                shutil.rmtree(launch, ignore_errors=True)
        if not failure and not (folder / "result.json").exists():
            failure = f"the TrainJob {self.name} ended without a result"
        if failure:
            raise TrainingFailed(f"{failure}; see {folder / 'train.log'}; start the step again to resume")

    def create(self, manifest: dict[str, Any]) -> None:
        from kubernetes.client import ApiException

        try:
            found = self.read()
            if not finished(found) and "deletionTimestamp" not in found["metadata"]:
                return
            self.delete()
        except ApiException as error:
            if error.status != 404:
                raise
        try:
            self.objects.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, manifest)
        except ApiException as error:
            text = " ".join(str(error.body or error.reason).split())[:300]
            if error.status == 404:
                raise InputError(
                    "num_nodes above 1 needs Kubeflow Trainer 2.3 or later (no TrainJob in this cluster)"
                ) from None
            if error.status in (400, 403, 422):
                raise InputError(f"the cluster refuses the TrainJob {self.name}: {text}") from None
            raise

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = self.objects.get_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, self.name
        )
        return found

    def wait(self) -> str:
        """Follow logs until the TrainJob has ended or must fail; returns why it failed, or ""."""
        blocked_since = failed_since = None
        last_failure = told = ""
        while True:
            state, pods = self.look()
            self.follow(pods)
            now = time.monotonic()
            last_failure = describe_failure(pods) or last_failure  # a failed pod may soon be gone
            if is_out_of_memory(pods):
                return last_failure
            if state:
                for thread in self.followed.values():
                    thread.join(timeout=5)
                outcome, message = state
                return "" if outcome == "Complete" else self.explain(last_failure or message)
            if rank_failure(launch_folder(self.folder), lost=LOST_PEER):
                failed_since = failed_since or now
                if now - failed_since > LOST_S:
                    return self.explain(last_failure)
            obstacle = self.find_obstacle(pods)
            blocked_since = (blocked_since or now) if obstacle else None
            if obstacle and blocked_since is not None:
                reason = f"{obstacle.reason.rstrip('.')}; {ADVICE}" if obstacle.may_pass else obstacle.reason
                if now - blocked_since > (self.full_s if obstacle.may_pass else self.stuck_s):
                    return reason
                if now - blocked_since > TELL_S and reason != told:
                    told = reason
                    self.notice(f"waiting: {told}")
            time.sleep(self.poll_s)

    def explain(self, failure: str) -> str:
        """A failure with what a rank reported of it; a user's error is raised as InputError."""
        cause = rank_failure(launch_folder(self.folder), lost=LOST_PEER)
        return f"{cause} ({failure})" if cause and failure else cause or failure

    def look(self) -> tuple[tuple[str, str] | None, list[Any]]:
        """How the TrainJob ended, if it has, and its pods; waits for an API server that is away."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        deadline = time.monotonic() + API_S
        while True:
            try:
                return finished(self.read()), self.list_pods()
            except (ApiException, HTTPError) as error:
                status = error.status if isinstance(error, ApiException) else 0
                if status == 404:
                    return ("Failed", f"the TrainJob {self.name} was deleted while it ran"), []
                if (400 <= int(status or 0) < 500 and status != 429) or time.monotonic() > deadline:
                    raise
            time.sleep(self.poll_s)

    def find_obstacle(self, pods: list[Any]) -> Obstacle | None:
        if len(pods) < self.num_nodes:
            return find_refusal(self.core, self.namespace, f"{self.name}-node-0")
        return find_obstacle(pods)

    def follow(self, pods: list[Any]) -> None:
        """Copy every container's log to OUT/train.log, and report rank 0's progress as this step's."""
        for pod in pods:
            for status in pod.status.container_statuses or []:
                key = (pod.metadata.name, status.restart_count)
                if key in self.followed or not (status.state.running or status.state.terminated):
                    continue
                thread = threading.Thread(
                    target=follow_log,
                    args=(self.core, self.namespace, pod.metadata.name),
                    kwargs={"path": self.folder / "train.log", "progress": self.progress},
                    daemon=True,
                )
                self.followed[key] = thread
                thread.start()

    def delete(self) -> None:
        """Delete the TrainJob and wait until its pods are gone: they write to the run's folder.

        In the background: while a TrainJob waits in the foreground for what it owns, its controller makes that anew.
        """
        from kubernetes.client import ApiException

        try:
            self.objects.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, self.name, propagation_policy="Background"
            )
        except ApiException as error:
            if error.status != 404:
                raise
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline and self.list_pods():
            time.sleep(0.5)

    def list_pods(self) -> list[Any]:
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"{JOB_LABEL}={self.name}")
        return list(found.items)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM (a deleted or terminated pod) ends it like an interrupt, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def remove_train_jobs(run_id: str) -> list[str]:
    """Delete TrainJobs that a pipeline run left: its step may have been killed before it could. Returns their names."""
    from kubernetes import client
    from kubernetes.client import ApiException

    namespace = load_cluster_access()
    objects = client.CustomObjectsApi()
    try:
        found = objects.list_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, label_selector=f"{RUN_LABEL}={run_id}"
        )["items"]
        names = [str(entry["metadata"]["name"]) for entry in found]
        for name in names:
            objects.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, propagation_policy="Background"
            )
    except ApiException as error:
        if error.status not in (403, 404):  # no Kubeflow Trainer in this cluster, or no right to use it
            raise
        return []
    return names


def finished(train_job: Mapping[str, Any]) -> tuple[str, str] | None:
    """("Complete" or "Failed", message) of a TrainJob that has ended."""
    for condition in train_job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message") or condition.get("reason") or condition["type"]
    return None


def load_cluster_access() -> str:
    """Log in as the pod's service account (or by KUBECONFIG, outside of a cluster); returns the namespace to use."""
    from kubernetes import config

    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config()
        account = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return os.environ.get("RECMILL_NAMESPACE") or account.read_text(encoding="utf-8").strip()
    try:
        config.load_kube_config(os.environ.get("KUBECONFIG"))
    except config.ConfigException as error:
        raise InputError(f"num_nodes above 1 needs a cluster: {error}") from None
    return os.environ.get("RECMILL_NAMESPACE", "default")
