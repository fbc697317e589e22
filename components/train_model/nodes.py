"""Training on several nodes: a Kubeflow Trainer TrainJob, followed from the step's own pod.

    step's pod                          pods of the TrainJob, one a node
    writes OUT/job.json          ->     torchrun reads it, ranks meet over the TrainJob's headless Service
    follows logs and conditions  <-     rank 0 writes OUT/result.json and the checkpoints

The folder OUT lies on a volume that all pods mount. Whatever ends the TrainJob, the same call again goes on from the
newest checkpoint, so a lost pod costs at most one checkpoint interval.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.placement import Placement
from components.train_model.pods import describe_failure, find_stuck, follow_log
from recmill.artifacts import InputError, dump_json, read_json, write_text_atomically
from recmill.progress import Progress, no_progress
from recmill.training.config import TrainConfig
from recmill.training.trainer import JOB, TrainingFailed, hold_folder, make_job, refuse_other_settings

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUNTIME = "torch-distributed"  # comes with Kubeflow Trainer
MANAGER = "recmill/train-model"  # owner of our runtimePatches
JOB_LABEL = "jobset.sigs.k8s.io/jobset-name"
POLL_S = 2.0
STUCK_S = 300  # a pod that cannot start (no such image, no such secret) for this long will not start at all


def train_on_nodes(
    data: str,
    *,
    out: str,
    plan: str | None,
    allocation: str | None,
    num_nodes: int,
    nproc: int,
    config: TrainConfig,
    placement: Placement,
    progress: Progress = no_progress,
    poll_s: float = POLL_S,
    stuck_s: float = STUCK_S,
) -> dict[str, Any]:
    """Train with `nproc` processes on each of `num_nodes` pods and give the content of OUT/result.json."""
    folder = Path(out).absolute()
    world_size = num_nodes * nproc
    job = make_job(data, out=folder, plan=plan, allocation=allocation, nproc=world_size, config=config)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        refuse_other_settings(folder, job)
        write_text_atomically(folder / JOB, dump_json(job))
        if not (folder / "result.json").exists():
            for report in folder.glob("error-*.json"):
                report.unlink()
            manifest = make_train_job(folder, num_nodes=num_nodes, nproc=nproc, config=config, placement=placement)
            TrainJobRun(manifest, folder=folder, progress=progress, poll_s=poll_s, stuck_s=stuck_s).run()
        return read_json(folder / "result.json")


def make_train_job(
    folder: Path, *, num_nodes: int, nproc: int, config: TrainConfig, placement: Placement
) -> dict[str, Any]:
    """The TrainJob of a run. Its name follows from the run's folder, so that a step started again finds it."""
    step = placement.step("train_model")
    threads = config.threads or max(1, step.cores // nproc)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # see recmill.training.trainer.launch
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    resources: dict[str, str] = {"cpu": step.cpu, "memory": step.memory}
    if step.gpus:
        resources[placement.gpu_type] = str(step.gpus)
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
                # The runtime tells torchrun who is who (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR); the rest is ours.
                "command": ["torchrun", "--nproc-per-node", str(nproc), "-m", "recmill.training.rank.worker"],
                "args": [str(folder / JOB)],
                "env": [{"name": name, "value": value} for name, value in environment.items()],
                "resourcesPerNode": {"requests": resources, "limits": resources},
            },
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {"name": "node", "template": {"spec": {"template": placement.worker_pod()}}}
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }


class TrainJobRun:
    """One TrainJob from its creation to its removal."""

    def __init__(
        self, manifest: Mapping[str, Any], *, folder: Path, progress: Progress, poll_s: float, stuck_s: float
    ) -> None:
        from kubernetes import client

        self.manifest, self.folder, self.progress = manifest, folder, progress
        self.poll_s, self.stuck_s = poll_s, stuck_s
        self.name = str(manifest["metadata"]["name"])
        self.namespace = load_cluster_access()
        self.objects = client.CustomObjectsApi()
        self.core = client.CoreV1Api()
        self.followed: dict[str, threading.Thread] = {}

    def run(self) -> None:
        """Create the TrainJob (or join the one an earlier attempt of this step left), wait, remove it."""
        self.create()
        try:
            failure = self.wait()
        finally:
            self.delete()
        if not failure and not (self.folder / "result.json").exists():
            failure = f"the TrainJob {self.name} ended without a result"
        if failure:
            self.raise_failure(failure)

    def create(self) -> None:
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
            self.objects.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, dict(self.manifest))
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
        """Follow logs until the TrainJob is done; why it failed, or nothing."""
        stuck_since: float | None = None
        last_failure = ""
        while True:
            state = finished(self.read())
            pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"{JOB_LABEL}={self.name}").items
            self.follow(pods)
            last_failure = describe_failure(pods) or last_failure  # a pod that failed may soon be gone
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
        """Copy what every pod says to OUT/train.log, and rank 0's progress to whoever follows this step."""
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

    def raise_failure(self, reason: str) -> None:
        """A user's error from a rank's report before a crash, a pod's own reason before its echoes."""
        reports = [read_json(path) for path in sorted(self.folder.glob("error-*.json"))]
        for report in reports:
            if report["kind"] == "input":
                raise InputError(report["message"])
        causes = [report for report in reports if "onnection" not in report["message"]]
        if causes and "memory limit" not in reason:
            message = " ".join(str(causes[0]["message"]).split())[:300]
            reason = f"rank {causes[0]['rank']} failed: {message} ({reason})"
        raise TrainingFailed(f"{reason}; see {self.folder / 'train.log'}; start the step again to resume")


def finished(train_job: Mapping[str, Any]) -> tuple[str, str] | None:
    """("Complete" or "Failed", message) of a TrainJob that has ended."""
    for condition in train_job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message") or condition.get("reason") or condition["type"]
    return None


def load_cluster_access() -> str:
    """Log in as the pod's service account (or by KUBECONFIG, outside of a cluster); gives the namespace to work in."""
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
