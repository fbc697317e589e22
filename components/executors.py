"""Spark executors of a step: pods of the step's own image, on the run's volume."""

from __future__ import annotations

import os

from components.placement import ClusterPlacement
from recmill.data.cluster.spark_session import ExecutorPods


def spark_settings(master: str, *, step: str) -> dict[str, str]:
    """Spark's settings for that master; on Kubernetes, with executors as large as the placement makes the step."""
    if master == "none":
        return {}
    if not master.startswith("k8s://"):
        return {"spark.master": master}
    placement = ClusterPlacement.from_environment()
    given = placement.step(step)
    pods = ExecutorPods(
        image=placement.image,
        namespace=os.environ.get("RECMILL_NAMESPACE", "default"),
        num_executors=placement.executors,
        cores=given.cores,
        cpu=given.cpu,
        cpu_request=given.cpu_request,
        memory_mib=given.memory_mib,
        claim=placement.claim,
        mount=placement.mount,
        service_account=placement.worker_account,
        labels=placement.labels("executor"),
        node_selector=dict(given.node_selector),
        tolerations=[taint.to_manifest() for taint in given.tolerations],
        driver_host=os.environ.get("RECMILL_POD_IP", ""),
        driver_pod=os.environ.get("RECMILL_POD", ""),
    )
    return {"spark.master": master, **pods.settings()}
