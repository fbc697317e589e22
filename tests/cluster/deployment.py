"""recmill deployed for the tests: overlays/kind in a separate namespace, with images that the nodes have."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube import Cluster, wait_until

POSTGRES = "docker.io/library/postgres"
RUNS = "recmill-runs"
USER = 10001
END = "-- the end --"  # of a script: a log may be read before all of it is there


@dataclass(frozen=True, kw_only=True)
class TestSite:
    __test__ = False

    cluster: Cluster
    namespace: str
    tag: str
    volumes: Path | None  # folders behind the volumes, if the cluster does not create volumes itself

    def image(self, name: str) -> str:
        return f"recmill/{name}:{self.tag}"

    def remove(self) -> None:
        self.cluster.run("delete", "namespace", self.namespace, "--wait=true", "--timeout=120s", check=False)
        if self.volumes:
            selector = f"recmill-test={self.namespace}"
            self.cluster.run("delete", "persistentvolume", "--selector", selector, "--wait=false", check=False)
            shutil.rmtree(self.volumes, ignore_errors=True)

    def job(
        self,
        name: str,
        container: dict[str, Any],
        *,
        account: str = "recmill-runner",
        has_token: bool = False,
        retries: int = 0,
        labels: dict[str, str] | None = None,
        pod: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A Job with everything a restricted namespace requires, the runs' volume and scratch space."""
        mounts = [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        marks = {"app.kubernetes.io/part-of": "recmill", "app.kubernetes.io/component": "step", **(labels or {})}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": self.namespace, "labels": marks},
            "spec": {
                "backoffLimit": retries,
                "template": {
                    "metadata": {"labels": marks},
                    "spec": {
                        "restartPolicy": "Never",
                        "serviceAccountName": account,
                        "automountServiceAccountToken": has_token,
                        "securityContext": {
                            "runAsNonRoot": True,
                            "runAsUser": USER,
                            "runAsGroup": USER,
                            "fsGroup": USER,
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "containers": [
                            {
                                "name": "main",
                                "imagePullPolicy": "IfNotPresent",
                                "volumeMounts": mounts,
                                "securityContext": {
                                    "allowPrivilegeEscalation": False,
                                    "readOnlyRootFilesystem": True,
                                    "capabilities": {"drop": ["ALL"]},
                                },
                                **container,
                            }
                        ],
                        "volumes": [
                            {"name": "runs", "persistentVolumeClaim": {"claimName": RUNS}},
                            {"name": "scratch", "emptyDir": {}},
                            {"name": "shm", "emptyDir": {"medium": "Memory"}},
                        ],
                        **(pod or {}),
                    },
                },
            },
        }

    def shell(self, name: str, script: str, *, image: str = "trainer", timeout_s: float = 300) -> str:
        """Output of a script in a pod with the runs' volume."""
        container = {"image": self.image(image), "command": ["/bin/sh", "-ec", f"{script}\nprintf '\\n{END}\\n'"]}
        self.cluster.apply(self.job(name, container), namespace=self.namespace)
        self.cluster.finish_job(name, namespace=self.namespace, timeout_s=timeout_s)
        (pod,) = self.cluster.pods(f"job-name={name}", namespace=self.namespace)
        read = partial(self.cluster.logs, pod["metadata"]["name"], namespace=self.namespace)
        said = wait_until(lambda: [log for log in (read(),) if END in log], timeout_s=30, what="the whole log")
        return str(said[0].partition(f"\n{END}")[0])


def deploy(cluster: Cluster, *, tag: str, root: Path) -> TestSite:
    """Apply overlays/kind and wait until MLflow and PostgreSQL are ready."""
    namespace = os.environ.get("RECMILL_TEST_NAMESPACE") or f"recmill-test-{uuid.uuid4().hex[:6]}"
    postgres = subprocess.run(
        [root / "images/tag.sh", "tests/cluster/postgres"], check=True, capture_output=True, text=True
    ).stdout.strip()
    rendered = cluster.render(root / "manifests/overlays/kind")
    objects = retarget(rendered, namespace=namespace, tag=tag, postgres=postgres)
    spaces = [entry for entry in objects if entry["kind"] == "Namespace"]
    cluster.apply(*spaces, *limits(namespace))
    volumes = make_volumes(cluster, objects, namespace)
    secrets = subprocess.run(
        [root / "manifests/secrets.sh", namespace],
        env={**os.environ, "KUBECTL": cluster.kubectl},
        capture_output=True,
        text=True,
        check=False,
    )
    assert secrets.returncode == 0, secrets.stderr
    site = TestSite(cluster=cluster, namespace=namespace, tag=tag, volumes=volumes)
    cluster.apply(*(entry for entry in objects if entry["kind"] != "Namespace"), namespace=namespace)
    for workload in ("statefulset/postgres", "deployment/mlflow"):
        status = cluster.run("rollout", "status", workload, "--namespace", namespace, "--timeout=300s", check=False)
        if status.returncode:
            said = cluster.run("describe", "pods", "--namespace", namespace, check=False).stdout[-4000:]
            logs = cluster.run("logs", workload, "--namespace", namespace, check=False).stdout[-2000:]
            raise AssertionError(f"{workload} does not become ready\n{said}\n{logs}")
    return site


def limits(namespace: str) -> list[dict[str, Any]]:
    """A quota of what a node with 2 cores and 8 GiB has left beside Kubeflow, and requests of pods that name none."""
    quota = {"requests.cpu": "1600m", "requests.memory": "6Gi"}
    default = {"type": "Container", "defaultRequest": {"cpu": "50m", "memory": "128Mi"}}
    return [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": "small-node", "namespace": namespace}, "spec": spec}
        for kind, spec in (("ResourceQuota", {"hard": quota}), ("LimitRange", {"limits": [default]}))
    ]


def retarget(rendered: str, *, namespace: str, tag: str, postgres: str) -> list[dict[str, Any]]:
    """The overlay's objects in a restricted namespace, with the images built for the tests."""
    objects = [entry for entry in yaml.safe_load_all(rendered) if entry]
    for entry in objects:
        if entry["kind"] == "Namespace":
            entry["metadata"]["name"] = namespace
            # The overlay's own level is for Kubeflow, which runs in the same namespace there.
            entry["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
        else:
            entry["metadata"]["namespace"] = namespace
        for subject in entry.get("subjects", []):
            subject["namespace"] = namespace
        for container in entry.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            name = container["image"].split(":")[0].split("@")[0]
            if name.startswith("recmill/"):
                container["image"] = f"{name}:{tag}"
            elif name == POSTGRES and not os.environ.get("RECMILL_TEST_REGISTRY"):
                container["image"] = f"recmill/postgres:{postgres}"  # tests/cluster/postgres: there may be no registry
    return objects


def make_volumes(cluster: Cluster, objects: list[dict[str, Any]], namespace: str) -> Path | None:
    """Local volumes for the claims, if the cluster has no storage class that creates them."""
    classes = cluster.run("get", "storageclass", "--output", "name").stdout.split()
    if classes:
        return None
    if cluster.run("get", "persistentvolume", "--selector", f"recmill-test={namespace}", "--output", "name").stdout:
        return None  # kept by an earlier call
    (node,) = cluster.run("get", "nodes", "--output", "name").stdout.split()
    folder = Path(tempfile.mkdtemp(prefix=f"{namespace}-"))
    folder.chmod(0o755)
    volumes = []
    for claim in (entry for entry in objects if entry["kind"] == "PersistentVolumeClaim"):
        path = folder / claim["metadata"]["name"]
        path.mkdir()
        volumes.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"{namespace}-{claim['metadata']['name']}", "labels": {"recmill-test": namespace}},
                "spec": {
                    "capacity": claim["spec"]["resources"]["requests"],
                    "accessModes": claim["spec"]["accessModes"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "storageClassName": "",
                    "claimRef": {"namespace": namespace, "name": claim["metadata"]["name"]},
                    "local": {"path": str(path)},
                    "nodeAffinity": {
                        "required": {
                            "nodeSelectorTerms": [
                                {
                                    "matchExpressions": [
                                        {
                                            "key": "kubernetes.io/hostname",
                                            "operator": "In",
                                            "values": [node.removeprefix("node/")],
                                        }
                                    ]
                                }
                            ]
                        }
                    },
                },
            }
        )
    cluster.apply(*volumes)
    return folder
