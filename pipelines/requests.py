"""What a compiled pipeline asks of a cluster: the largest step, and the most that it asks for at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from components.placement import quantity
from recmill.sizes import format_bytes

# With several nodes, each of these starts a pod like itself per node.
TRAINERS = ("train-baseline", "train-model", "train-shared")
UNBOUNDED = 10  # iterations of a loop without a limit that we count


class StepRequest(NamedTuple):
    """CPUs and bytes of memory that must be free, and GPUs."""

    gpus: int = 0
    memory_bytes: float = 0.0
    cpus: float = 0.0

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus:g} CPU, {format_bytes(self.memory_bytes)}{gpus}"


@dataclass(frozen=True, kw_only=True)
class PipelineRequests:
    """The requests of a compiled pipeline."""

    largest_step: str
    largest: StepRequest
    peak: StepRequest  # of all steps that can run at the same time; each resource by itself

    def describe(self) -> str:
        step = self.largest_step.replace("-", "_")
        return f"the largest step, {step}, asks for {self.largest}; at most {self.peak} are asked for at a time"

    @classmethod
    def load(cls, package: Path, *, num_nodes: int = 1) -> Self:
        """The requests of a YAML file that `recmill compile` wrote."""
        spec = next(iter(yaml.safe_load_all(package.read_text(encoding="utf-8"))))
        steps = _steps(spec, num_nodes)
        largest = max(steps, key=lambda name: steps[name])
        return cls(largest_step=largest, largest=steps[largest], peak=_peak(spec["root"]["dag"], spec, steps))


def _steps(spec: Mapping[str, Any], num_nodes: int) -> dict[str, StepRequest]:
    """Each step's request, by the name of its component; with the pods that it starts."""
    found = {}
    executors = spec["deploymentSpec"]["executors"]
    for name, component in spec["components"].items():
        if "executorLabel" not in component:
            continue
        asked = executors[component["executorLabel"]]["container"].get("resources", {})
        gpus = int(asked.get("accelerator", {}).get("resourceCount", 0))
        cpus, memory = asked.get("resourceCpuRequest", "0"), asked.get("resourceMemoryRequest", "0")
        step = name.removeprefix("comp-")
        own = StepRequest(gpus=gpus, memory_bytes=quantity(memory), cpus=quantity(cpus))
        found[step] = _total([own] * (1 + num_nodes if num_nodes > 1 and step in TRAINERS else 1))
    return found


def _peak(dag: Mapping[str, Any], spec: Mapping[str, Any], steps: Mapping[str, StepRequest]) -> StepRequest:
    """The largest sums over tasks of which none waits for another."""
    tasks = dag["tasks"]
    waits = {name: _ancestors(name, tasks) for name in tasks}
    asked = {name: _task_peak(task, spec, steps) for name, task in tasks.items()}
    sums = [_total([asked[name] for name in chosen]) for chosen in _independent(list(tasks), waits)]
    return StepRequest(*map(max, zip(*sums, strict=True)))


def _total(asked: Iterable[StepRequest]) -> StepRequest:
    return StepRequest(*map(sum, zip(*asked, strict=True)))


def _task_peak(task: Mapping[str, Any], spec: Mapping[str, Any], steps: Mapping[str, StepRequest]) -> StepRequest:
    name = task["componentRef"]["name"]
    component = spec["components"][name]
    if "dag" not in component:
        return steps[name.removeprefix("comp-")]
    times = 1
    if any("iterator" in key.lower() and key != "iteratorPolicy" for key in task):
        times = int(task.get("iteratorPolicy", {}).get("parallelismLimit", 0)) or UNBOUNDED
    return _total([_peak(component["dag"], spec, steps)] * times)


def _ancestors(name: str, tasks: Mapping[str, Any]) -> frozenset[str]:
    found: set[str] = set()
    open_names = list(tasks[name].get("dependentTasks", []))
    while open_names:
        other = open_names.pop()
        if other not in found:
            found.add(other)
            open_names += tasks[other].get("dependentTasks", [])
    return frozenset(found)


def _independent(names: list[str], waits: Mapping[str, frozenset[str]]) -> Iterable[list[str]]:
    """Every set of tasks that can run side by side."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    yield from _independent(rest, waits)
    beside = [name for name in rest if first not in waits[name] and name not in waits[first]]
    for chosen in _independent(beside, waits):
        yield [first, *chosen]
