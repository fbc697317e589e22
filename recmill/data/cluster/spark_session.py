"""A Spark session for the engine 'spark' on a master of the caller's choice, for example a Kubernetes cluster.

The process that calls Spark is the driver (client mode). In a pod, executors are owned by that pod and end with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recmill.artifacts import InputError
from recmill.data.cluster.spark_engine import missing_for_spark, start_session

USER = 10001  # of the images
PREFIX = "spark.kubernetes"
IMAGE = f"{PREFIX}.container.image"


@contextmanager
def spark_session(settings: Mapping[str, str]) -> Iterator[None]:
    """An active Spark session with these settings inside the block; without settings it does nothing."""
    if not settings:
        yield
        return
    if reason := missing_for_spark():
        raise InputError(f"engine 'spark' cannot run: {reason}; or use engine 'duckdb'")
    master = settings.get("spark.master", "")
    if master.startswith("k8s://") and not settings.get(IMAGE):
        raise InputError(f"--master {master}: {IMAGE} is missing; name the image recmill/data with its tag")
    if master.startswith("k8s://"):
        os.environ["PYSPARK_PYTHON"] = "python3"  # the image's, not this machine's
    session = start_session(settings)
    try:
        yield
    finally:
        session.stop()


def session_settings(engine: str, master: str | None, flags: Sequence[str]) -> dict[str, str]:
    """Spark's settings from command-line flags; a Kubernetes master gets executors without privileges."""
    if engine != "spark":
        if master or flags:
            raise InputError(f"--master and --spark are for --engine spark, received --engine {engine}")
        return {}
    given = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals or not name.startswith("spark."):
            raise InputError(f"--spark {flag!r}: expected NAME=VALUE with a name that starts with 'spark.'")
        given[name] = value
    if not master:
        return given
    if not master.startswith("k8s://"):
        return {"spark.master": master, **given}
    pods = ExecutorPods(
        image=os.environ.get("RECMILL_IMAGE", ""),
        namespace=os.environ.get("RECMILL_NAMESPACE", "default"),
        claim=os.environ.get("RECMILL_CLAIM", ""),
        driver_host=os.environ.get("RECMILL_POD_IP", ""),
        driver_pod=os.environ.get("RECMILL_POD", ""),
    )
    return {"spark.master": master, **pods.settings(), **given}


@dataclass(frozen=True, kw_only=True)
class ExecutorPods:
    """Spark's executors on a Kubernetes cluster."""

    image: str
    namespace: str = "default"
    num_executors: int = 2
    cores: int = 1  # concurrent tasks per executor
    cpu: str = ""  # the pod's CPU limit as Kubernetes writes it; defaults to the cores
    cpu_request: str = ""  # defaults to the limit
    memory_mib: int = 4096  # per pod
    claim: str = ""  # a volume that holds log and dataset, mounted at `mount`
    mount: str = "/runs"
    service_account: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    driver_host: str = ""  # the address at which executors reach the driver; Spark guesses it by default
    driver_pod: str = ""

    def settings(self) -> dict[str, str]:
        """Spark's settings by name."""
        volume = f"{PREFIX}.executor.volumes.persistentVolumeClaim.runs"
        chosen = {
            f"{PREFIX}.namespace": self.namespace,
            IMAGE: self.image,
            f"{PREFIX}.container.image.pullPolicy": "IfNotPresent",
            f"{PREFIX}.authenticate.executor.serviceAccountName": self.service_account,
            f"{PREFIX}.executor.podTemplateFile": write_pod_template(self),
            # Settings go in the command line: the runner has no permission to write ConfigMaps.
            f"{PREFIX}.executor.disableConfigMap": "true",
            "spark.executor.instances": str(self.num_executors),
            "spark.executor.cores": str(self.cores),
            # Half for Java, half for the Python workers, which write the Parquet files.
            "spark.executor.memory": f"{self.memory_mib // 2}m",
            "spark.executor.memoryOverhead": f"{self.memory_mib - self.memory_mib // 2}m",
            f"{PREFIX}.executor.request.cores": self.cpu_request or self.cpu or str(self.cores),
            f"{PREFIX}.executor.limit.cores": self.cpu or str(self.cores),
            "spark.driver.bindAddress": "0.0.0.0",
            # Otherwise executors call the address that the driver binds to, 0.0.0.0.
            f"{PREFIX}.executor.useDriverPodIP": "false",
            "spark.pyspark.python": "python3",
        }
        if self.claim:
            chosen[f"{volume}.options.claimName"] = self.claim
            chosen[f"{volume}.mount.path"] = self.mount
        if self.driver_host:
            chosen["spark.driver.host"] = self.driver_host
        if self.driver_pod:
            chosen[f"{PREFIX}.driver.pod.name"] = self.driver_pod
        return chosen


def write_pod_template(pods: ExecutorPods) -> str:
    """The path of a pod template for what Spark has no settings for: non-root, no privileges, a read-only root."""
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "spark-kubernetes-executor",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        spec["tolerations"] = [dict(taint) for taint in pods.tolerations]
    template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": dict(pods.labels)}, "spec": spec}
    folder = Path(tempfile.mkdtemp(prefix="recmill-spark-"))
    path = folder / "executor.yaml"
    path.write_text(yaml.safe_dump(template), encoding="utf-8")
    return str(path)
