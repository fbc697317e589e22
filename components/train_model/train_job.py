"""Training on several nodes: the ranks run in pods of a Kubeflow Trainer TrainJob, followed from the step's own pod.

    step's pod: train()                        pods of the TrainJob, one per node
    writes OUT/launch/job.json           ->    torchrun reads it, ranks meet over the TrainJob's headless Service
    follows logs and conditions          <-    rank 0 writes OUT/result.json and the checkpoints

All pods mount the volume that holds OUT. Whatever ends the TrainJob, the same call again resumes from the newest
checkpoint, so a lost pod costs at most one checkpoint interval.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.placement import ClusterPlacement
from components.train_model.pods import describe_failure, find_stuck, follow_log
from recmill.artifacts import InputError, dump_json, write_text_atomically
from recmill.progress import Progress, no_progress
from recmill.training.processes import rank_variables
from recmill.training.trainer import AGENT, JOB, TrainingFailed, rank_arguments, rank_failure

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUNTIME = "torch-distributed"  # comes with Kubeflow Trainer
MANAGER = "recmill/train-model"  # owner of our runtimePatches
JOB_LABEL = "jobset.sigs.k8s.io/jobset-name"
POLL_S = 2.0
STUCK_S = 300  # a pod that cannot start (no such image, no such secret) for this long will not start at all


def make_train_job(
    job: Mapping[str, Any], folder: Path, *, num_nodes: int, num_local: int, placement: ClusterPlacement
) -> dict[str, Any]:
    """The TrainJob of a run. Its name follows from the run's folder, so that a restarted step finds it."""
    step = placement.step("train_model")
    variables = rank_variables(job["config"]["threads"] or max(1, step.cores // num_local))
    gpus = {placement.gpu_type: str(step.gpus)} if step.gpus else {}
    resources = {kind: amounts | gpus for kind, amounts in step.resources.items()}
    node = {"name": "node", "template": {"spec": {"template": placement.worker_pod()}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": f"recmill-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}",
            "labels": placement.labels("trainer"),
        },
        "spec": {
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
    """A launcher for `train()`: runs the ranks as one TrainJob, from its creation to its removal."""

    def __init__(
        self,
        *,
        num_nodes: int,
        placement: ClusterPlacement,
        progress: Progress = no_progress,
        poll_s: float = POLL_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self.num_nodes, self.placement, self.progress = num_nodes, placement, progress
        self.poll_s, self.stuck_s = poll_s, stuck_s
        self.followed: dict[str, threading.Thread] = {}

    def __call__(self, job: Mapping[str, Any], folder: Path, nproc: int) -> None:
        """Create the TrainJob (or join the one that an earlier attempt of this step left), wait, remove it."""
        from kubernetes import client

        launch_folder(folder).mkdir(exist_ok=True)
        for report in launch_folder(folder).glob("error-*.json"):
            report.unlink()
        write_text_atomically(launch_folder(folder) / JOB, dump_json(job))
        num_local = nproc // self.num_nodes
        manifest = make_train_job(job, folder, num_nodes=self.num_nodes, num_local=num_local, placement=self.placement)
        self.folder, self.name = folder, str(manifest["metadata"]["name"])
        self.namespace = load_cluster_access()
        self.objects, self.core = client.CustomObjectsApi(), client.CoreV1Api()
        self.create(manifest)
        try:
            failure = self.wait()
        finally:
            self.delete()
        if not failure and not (folder / "result.json").exists():
            failure = f"the TrainJob {self.name} ended without a result"
        if failure:
            # A pod killed at its memory limit says more than the ranks that lost their connection to it.
            cause = rank_failure(launch_folder(folder))
            reason = f"{cause} ({failure})" if cause and "memory limit" not in failure else failure
            raise TrainingFailed(f"{reason}; see {folder / 'train.log'}; start the step again to resume")

    def create(self, manifest: dict[str, Any]) -> None:
        from kubernetes.client import ApiException

        try:
            if finished(self.read()):
                self.delete()
            else:
                return
        except ApiException as error:
            if error.status != 404:
                raise
        try:
            self.objects.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, manifest)
        except ApiException as error:
            text = " ".join(str(error.body or error.reason).split())[:300]
            if error.status == 404:
                raise InputError(
                    "num_nodes above 1 needs Kubeflow Trainer 2.2 or later (no TrainJob in this cluster)"
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
        """Follow logs until the TrainJob has ended; returns why it failed, or ""."""
        stuck_since: float | None = None
        last_failure = ""
        while True:
            state = finished(self.read())
            pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"{JOB_LABEL}={self.name}").items
            self.follow(pods)
            last_failure = describe_failure(pods) or last_failure  # a failed pod may soon be gone
            if state:
                for thread in self.followed.values():
                    thread.join(timeout=5)
                outcome, message = state
                return "" if outcome == "Complete" else last_failure or message
            stuck = find_stuck(pods)
            stuck_since = (stuck_since or time.monotonic()) if stuck else None
            if stuck and stuck_since is not None and time.monotonic() - stuck_since > self.stuck_s:
                return stuck
            time.sleep(self.poll_s)

    def follow(self, pods: list[Any]) -> None:
        """Copy every pod's log to OUT/train.log, and report rank 0's progress as this step's."""
        for pod in pods:
            name = pod.metadata.name
            if name in self.followed or pod.status.phase == "Pending":
                continue
            thread = threading.Thread(
                target=follow_log,
                args=(self.core, self.namespace, name),
                kwargs={"path": self.folder / "train.log", "progress": self.progress},
                daemon=True,
            )
            self.followed[name] = thread
            thread.start()

    def delete(self) -> None:
        from kubernetes.client import ApiException

        try:
            self.objects.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, self.name, propagation_policy="Foreground"
            )
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                self.read()
                time.sleep(0.5)
        except ApiException as error:
            if error.status != 404:
                raise


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
