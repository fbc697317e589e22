"""Logs of pods, and why pods failed or cannot start, in one sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.placement import PLACED_LIKE
from recmill.progress import Progress
from recmill.training.processes import PROGRESS_MARK

# Reasons for which a container waits until somebody changes something. Nodes with room may come up by themselves.
IMAGE_REASONS = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
STUCK_REASONS = (*IMAGE_REASONS, "CreateContainerConfigError", "CreateContainerError")
OUT_OF_MEMORY = "OOMKilled"


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why pods do not start; `may_pass` if it may go away without anybody changing the job."""

    reason: str
    may_pass: bool


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


def describe_failure(pods: list[Any], step: str = "train_model") -> str:
    """Why a pod of the step failed, those killed at their memory limit first; "" if none did."""
    found = []
    for pod in pods:
        for status, ended in _endings(pod):
            limit = _memory_limit(pod, status.name)
            found.append((ended.reason != OUT_OF_MEMORY, _sentence(pod.metadata.name, ended, limit, step)))
        if pod.status.reason:  # Evicted, NodeLost, DeadlineExceeded
            said = f"pod {pod.metadata.name} was lost: {pod.status.reason} {pod.status.message or ''}".strip()
            found.append((False, said))
    return min(found)[1] if found else ""


def is_out_of_memory(pods: list[Any]) -> bool:
    """Whether a container was killed at its memory limit, even if it has been started again."""
    return any(ended.reason == OUT_OF_MEMORY for pod in pods for _, ended in _endings(pod))


def find_obstacle(pods: list[Any]) -> Obstacle | None:
    """Why the first pod that cannot start cannot; None if all can."""
    for pod in pods:
        name = pod.metadata.name
        for status in pod.status.container_statuses or []:
            waiting = status.state.waiting
            if waiting and waiting.reason in STUCK_REASONS:
                image = f" (image {status.image})" if waiting.reason in IMAGE_REASONS else ""
                said = f"pod {name} cannot start{image}: {waiting.reason}: {waiting.message or ''}".strip(": ")
                return Obstacle(reason=said, may_pass=False)
        for condition in pod.status.conditions or []:
            if condition.type == "PodScheduled" and condition.status == "False":
                return Obstacle(reason=f"pod {name} cannot be scheduled: {condition.message}", may_pass=True)
    return None


def find_refusal(core: Any, namespace: str, name: str) -> Obstacle | None:
    """Why the cluster creates no pod of a job: its newest warning (a quota, an admission rule), if it may be read."""
    from kubernetes.client import ApiException

    try:
        events = core.list_namespaced_event(
            namespace, field_selector=f"involvedObject.name={name},type=Warning,reason=FailedCreate"
        ).items
    except ApiException:
        return None  # no right to read events
    if not events:
        return None
    newest = max(events, key=lambda event: str(event.last_timestamp or event.event_time or ""))
    return Obstacle(reason=f"the cluster refuses the pods of {name}: {newest.message}", may_pass=True)


def _endings(pod: Any) -> list[tuple[Any, Any]]:
    """(container status, how it ended) of containers that failed, also of those that run again."""
    looked = [
        (status, status.state.terminated or (status.last_state and status.last_state.terminated))
        for status in pod.status.container_statuses or []
    ]
    return [(status, ended) for status, ended in looked if ended and ended.exit_code != 0]


def _sentence(name: str, ended: Any, limit: str, step: str) -> str:
    if ended.reason == OUT_OF_MEMORY:
        placed, killed = PLACED_LIKE.get(step, step), f"was killed at its memory limit of {limit} ({OUT_OF_MEMORY})"
        more = ", use more nodes, or lower batch_size" if placed == "train_model" else ""
        return f"pod {name} {killed}; give {placed} more memory in the placement{more}"
    return f"pod {name} ended with exit code {ended.exit_code} ({ended.reason or 'Error'})"


def _memory_limit(pod: Any, container: str) -> str:
    for entry in pod.spec.containers:
        if entry.name == container and entry.resources and entry.resources.limits:
            return str(entry.resources.limits.get("memory", "unknown size"))
    return "unknown size"
