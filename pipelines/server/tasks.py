"""The steps of a run, out of the nodes that the server lists.

The server reports every node of the workflow engine, under the engine's names, without links from a node to its step:

    root-driver(0)   exit-handler-1   generate-data-driver   generate-data   executor   executor(0)   ...

A step of ours is the node with the step's name. The pod that does its work is a child of one of the nodes `executor`;
which one is known from the lines `[generate_data] ...` in the pod's log. A step that Kubeflow takes from its cache has
an `executor` that was skipped, and no such log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from components.images import IMAGES
from pipelines.local import SAYING

STEP = re.compile(rf"({'|'.join(name.replace('_', '-') for name in IMAGES)})(-\d+)?")
EXECUTOR = re.compile(r"executor(\(\d+\))?")
PODS = re.compile(r"(executor|.*-driver)(\(\d+\))?")
ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """One step of a run as the server shows it now."""

    task_id: str
    name: str  # "train_model", in a loop "train_model_2" for the second that began
    state: str
    began: datetime | None
    ended: datetime | None
    has_skipped_work: bool  # a skipped `executor` lies within its time: the step may come from the cache

    @property
    def kind(self) -> str:
        return re.sub(r"_\d+$", "", self.name)

    @property
    def seconds(self) -> float | None:
        return (self.ended - self.began).total_seconds() if self.began and self.ended else None


@dataclass(frozen=True, kw_only=True)
class PodLog:
    """What the log of a step's pod says about it."""

    node: str
    step: str
    result: str = ""  # what it printed when it was done
    error: str = ""  # the sentence that it failed with


def steps_of(run: Any) -> list[RunStep]:
    """The steps of a run in the order in which they began; one that has not begun yet is not listed."""
    tasks = _tasks(run)
    skipped = [task for task in tasks if EXECUTOR.fullmatch(task.display_name) and task.state == "SKIPPED"]
    found = [
        RunStep(
            task_id=task.task_id or task.display_name,
            name=task.display_name.replace("-", "_"),
            state=task.state or "PENDING",
            began=_time(task.start_time),
            ended=_time(task.end_time) if task.state in ENDED else None,
            has_skipped_work=task.state == "SKIPPED" or any(_is_within(work, task) for work in skipped),
        )
        for task in tasks
        if STEP.fullmatch(task.display_name)
    ]
    found.sort(key=lambda step: step.began.timestamp() if step.began else float("inf"))
    counts = Counter[str]()
    for place, step in enumerate(found):
        counts[step.name] += 1
        if counts[step.name] > 1:
            found[place] = replace(step, name=f"{step.name}_{counts[step.name]}")
    return found


def pods_of(run: Any) -> dict[str, str]:
    """The pods that do the steps' work: name -> state of the `executor` that they belong to."""
    return {
        child.pod_name: task.state or "PENDING"
        for task in _tasks(run)
        if task.display_name == "executor"
        for child in task.child_tasks or []
        if child.pod_name
    }


def is_waiting(run: Any) -> bool:
    """Whether pods of the run wait for a node or an image and none is at work."""
    states = [task.state for task in _tasks(run) if PODS.fullmatch(task.display_name)]
    return not states or ("RUNNING" not in states and any(state in (None, "PENDING") for state in states))


def read_step_log(node: str, lines: Iterable[str]) -> PodLog | None:
    """What a pod's log says about its step; None if no step speaks in it."""
    found: PodLog | None = None
    for line in lines:
        match = SAYING.fullmatch(line.strip())
        if not match or match["step"] not in IMAGES:
            continue
        found = found or PodLog(node=node, step=match["step"])
        for mark, field in (("done in ", "result"), ("error: ", "error"), ("failed: ", "error")):
            if match["text"].startswith(mark):
                said = match["text"].removeprefix(mark).partition(": ")[2] if field == "result" else match["text"]
                found = PodLog(**{**vars(found), field: said.removeprefix(mark)})
    return found


def _tasks(run: Any) -> list[Any]:
    details = run.run_details.task_details if run.run_details else None
    return [task for task in details or [] if task.display_name]


def _time(value: datetime | None) -> datetime | None:
    """A time of the server, which writes 1970 where it knows none."""
    return value if value and value.year > 1970 else None


def _is_within(inner: Any, outer: Any) -> bool:
    at, began, ended = _time(inner.start_time), _time(outer.start_time), _time(outer.end_time)
    return bool(at and began and began <= at and (not ended or at <= ended))
