"""Why a run waits or a pod of it died: what the cluster says, read with the user's own access to it."""

from __future__ import annotations

import os
from typing import Any

from components.train_model.pods import describe_failure, find_obstacle

RUN_LABEL = "pipeline/runid"


def why_waiting(run_id: str, namespace: str) -> str:
    """One sentence: the scheduler's or kubelet's reason, or where to look if the cluster cannot be read."""
    hint = f"kubectl --namespace {namespace} get events --field-selector type=Warning"
    fallback = f"waiting for a node; `{hint}` shows why"
    try:
        core = _open_cluster()
        pods = _pods(core, run_id, namespace)
        obstacle = find_obstacle(pods)
        reason = obstacle.reason if obstacle else _newest_warning(core, namespace, pods)
        return f"waiting: {reason}" if reason else fallback
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the user's access, the run is still followed
        return f"{fallback} (this machine cannot read the cluster: {type(error).__name__})"


def why_pod_died(run_id: str, namespace: str, step: str) -> str:
    """What the cluster knows about pods of the run that failed, in one sentence; "" if it cannot be read."""
    try:
        return describe_failure(_pods(_open_cluster(), run_id, namespace), step)
    except Exception:  # noqa: BLE001 - the server's answer has to do, then
        return ""


def _pods(core: Any, run_id: str, namespace: str) -> list[Any]:
    found = core.list_namespaced_pod(namespace, label_selector=f"{RUN_LABEL}={run_id}", _request_timeout=5)
    return list(found.items)


def _open_cluster() -> Any:
    from kubernetes import client, config

    return client.CoreV1Api(config.new_client_from_config(os.environ.get("KUBECONFIG")))


def _newest_warning(core: Any, namespace: str, pods: list[Any]) -> str:
    names = {pod.metadata.name for pod in pods}
    events = core.list_namespaced_event(namespace, field_selector="type=Warning", _request_timeout=5).items
    own = [event for event in events if event.involved_object.name in names]
    return f"pod {own[-1].involved_object.name}: {own[-1].message}" if own else ""
