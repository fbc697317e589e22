"""Acts as Kubeflow Trainer's controller, which needs a newer Kubernetes than some test clusters have.

For each TrainJob: a headless Service, one pod per node with the runtime's environment and the TrainJob's patches, and
the conditions that follow from the pods' results. The TrainJob owns these objects, so they are deleted with it.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.kube import Cluster

JOBSET = "jobset.sigs.k8s.io/jobset-name"
PORT = 29400


@dataclass
class TrainerController:
    cluster: Cluster
    namespace: str
    seen: list[dict[str, Any]] = field(default_factory=list)  # every TrainJob, as it was created
    stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> TrainerController:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        self.thread.join(timeout=30)

    def _work(self) -> None:
        while not self.stopping.wait(1):
            for job in self.cluster.get("trainjobs", namespace=self.namespace)["items"]:
                if job["metadata"].get("deletionTimestamp"):
                    continue
                if job["metadata"]["uid"] not in {entry["metadata"]["uid"] for entry in self.seen}:
                    self.seen.append(job)
                    self.cluster.apply(*make_objects(job), namespace=self.namespace)
                elif not job.get("status"):
                    self._conclude(job)

    def _conclude(self, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        pods = self.cluster.pods(f"{JOBSET}={name}", namespace=self.namespace)
        phases = [pod["status"]["phase"] for pod in pods]
        if "Failed" in phases or len(phases) < job["spec"]["trainer"]["numNodes"]:
            self._set(name, "Failed", "jobset failed due to one or more job failures")
        elif set(phases) == {"Succeeded"}:
            self._set(name, "Complete", "TrainJob completed")

    def _set(self, name: str, kind: str, message: str) -> None:
        from kubernetes import client, config
        from kubernetes.client import ApiException

        config.load_kube_config()
        status = {"conditions": [{"type": kind, "status": "True", "reason": kind, "message": message}]}
        try:
            client.CustomObjectsApi().patch_namespaced_custom_object_status(
                "trainer.kubeflow.org", "v1alpha1", self.namespace, "trainjobs", name, {"status": status}
            )
        except ApiException as error:
            if error.status != 404:
                raise


def make_objects(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The Service and the pods of a TrainJob."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node", "the runtime torch-distributed has no other job"
    patched = json.dumps(replicated["template"]["spec"]["template"])
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": "TrainJob",
        "name": name,
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": {"clusterIP": "None", "selector": {JOBSET: name}, "publishNotReadyAddresses": True},
    }
    pods = []
    for rank in range(trainer["numNodes"]):
        pod = json.loads(patched)
        (container,) = pod["spec"]["containers"]
        assert container["name"] == "node"
        container |= {
            "image": trainer["image"],
            "imagePullPolicy": "IfNotPresent",
            "command": trainer["command"],
            "args": trainer["args"],
            "resources": {
                "limits": trainer["resourcesPerNode"]["limits"],
                "requests": {"cpu": "100m", "memory": "200Mi"},
            },
            "env": [
                *trainer["env"],
                {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
                {"name": "PET_NODE_RANK", "value": str(rank)},
                {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
                {"name": "PET_MASTER_PORT", "value": str(PORT)},
            ],
        }
        spec = {"restartPolicy": "Never", "hostname": f"{name}-node-0-{rank}", "subdomain": name, **pod["spec"]}
        labels = {JOBSET: name, **pod["metadata"]["labels"]}
        metadata = {"name": f"{name}-node-0-{rank}", "labels": labels, "ownerReferences": [owner]}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return [service, *pods]
