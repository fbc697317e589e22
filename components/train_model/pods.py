"""Logs of pods, and why pods failed, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recmill.progress import Progress
from recmill.training.processes import PROGRESS_MARK

# Reasons for which a container waits until somebody changes something.
STUCK_REASONS = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


def follow_log(core: Any, namespace: str, name: str, *, path: Path, progress: Progress) -> None:
    """Copy a growing log to a file, each line with the pod's name; progress lines go to `progress` instead."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        stream = core.read_namespaced_pod_log(name, namespace, follow=True, _preload_content=False)
        partial = ""
        for chunk in stream.stream():
            *lines, partial = (partial + chunk.decode(errors="replace")).split("\n")
            with open(path, "a", encoding="utf-8") as file:
                for line in lines:
                    if line.startswith(PROGRESS_MARK):
                        progress(*json.loads(line.removeprefix(PROGRESS_MARK)))
                    else:
                        file.write(f"[{name}] {line}\n")
    except (ApiException, HTTPError, OSError) as error:
        with open(path, "a", encoding="utf-8") as file:  # the pod is gone; its status gives the reason
            file.write(f"[{name}] the log ends here: {error.__class__.__name__}\n")


def describe_failure(pods: list[Any]) -> str:
    """Why a pod failed, those killed at their memory limit first; "" if none did."""
    found = []
    for pod in pods:
        for status in pod.status.container_statuses or []:
            ended = status.state.terminated or (status.last_state and status.last_state.terminated)
            if ended and ended.exit_code != 0:
                limit = _memory_limit(pod, status.name)
                found.append((ended.reason != "OOMKilled", _sentence(pod.metadata.name, ended, limit)))
        if pod.status.reason:  # Evicted, NodeLost, DeadlineExceeded
            said = f"pod {pod.metadata.name} was lost: {pod.status.reason} {pod.status.message or ''}".strip()
            found.append((False, said))
    return min(found)[1] if found else ""


def find_stuck(pods: list[Any]) -> str:
    """Which pod cannot start, and why; "" if all can."""
    for pod in pods:
        for status in pod.status.container_statuses or []:
            waiting = status.state.waiting
            if waiting and waiting.reason in STUCK_REASONS:
                return f"pod {pod.metadata.name} cannot start: {waiting.reason}: {waiting.message or ''}".strip(": ")
        for condition in pod.status.conditions or []:
            if condition.type == "PodScheduled" and condition.status == "False":
                return f"pod {pod.metadata.name} cannot be scheduled: {condition.message}"
    return ""


def _sentence(name: str, ended: Any, limit: str) -> str:
    if ended.reason == "OOMKilled":
        return (
            f"pod {name} was killed at its memory limit of {limit} (OOMKilled); give train_model more memory in the "
            "placement, use more nodes, or lower batch_size"
        )
    return f"pod {name} ended with exit code {ended.exit_code} ({ended.reason or 'Error'})"


def _memory_limit(pod: Any, container: str) -> str:
    for entry in pod.spec.containers:
        if entry.name == container and entry.resources and entry.resources.limits:
            return str(entry.resources.limits.get("memory", "unknown size"))
    return "unknown size"
