"""Where steps run on a cluster and what they get: resources, GPUs, nodes, volumes, secrets, timeouts.

A placement is chosen when the pipeline is compiled (`recmill compile --placement FILE`), sets up every
task there, and is passed to steps that start pods of their own (`RECMILL_PLACEMENT`), so that those get the same.

    # placement.yaml: what differs from the defaults
    claim: recmill-runs
    steps:
      train_model: {cpu: "16", memory: 128Gi, gpus: 4, node_selector: {pool: gpu}, shm: 16Gi, timeout_s: 86400}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import yaml

from recmill.artifacts import InputError, refuse_credentials

VARIABLE = "RECMILL_PLACEMENT"
USER = 10001  # of the images
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """A taint that a step's pod tolerates; without a value, any value of the key."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __post_init__(self) -> None:
        if self.effect not in EFFECTS:
            raise InputError(f"toleration of {self.key}: effect is {self.effect!r}, expected one of {EFFECTS}")

    def to_manifest(self) -> dict[str, str]:
        return {
            "key": self.key,
            "operator": "Equal" if self.value else "Exists",
            "effect": self.effect,
        } | ({"value": self.value} if self.value else {})


@dataclass(frozen=True, kw_only=True)
class StepPlacement:
    """What the pod of one step gets: what it may use (cpu, memory) and what must be free for it to start (requests)."""

    cpu: str = "2"
    memory: str = "4Gi"
    cpu_request: str = "250m"
    memory_request: str = "1Gi"  # at least the peak of the demo: a pod above its request is evicted first
    process_memory_request: str = "0"  # in addition, for each training process of the pod after the first
    gpus: int = 0
    shm: str = ""  # size of /dev/shm, where processes of one pod share memory; a container has 64 MiB by default
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout_s: int = 6 * 3600
    retries: int = 2

    @property
    def cores(self) -> int:
        """Whole cores that it may use, at least one."""
        return max(1, int(quantity(self.cpu)))

    @property
    def memory_mib(self) -> int:
        return int(quantity(self.memory)) // 2**20

    def resources(self, num_processes: int = 1) -> dict[str, dict[str, str]]:
        """Requests and limits as a manifest writes them, without GPUs, of a pod with so many training processes."""
        request = quantity(self.memory_request) + (max(num_processes, 1) - 1) * quantity(self.process_memory_request)
        request = min(request, quantity(self.memory))
        memory = self.memory_request if request <= quantity(self.memory_request) else f"{int(request) // 2**20}Mi"
        return {
            "requests": {"cpu": self.cpu_request, "memory": memory},
            "limits": {"cpu": self.cpu, "memory": self.memory},
        }

    def __post_init__(self) -> None:
        for name in ("cpu", "memory", "cpu_request", "memory_request", "process_memory_request", "shm"):
            value = getattr(self, name)
            if (value or name != "shm") and not (isinstance(value, str) and QUANTITY.fullmatch(value)):
                raise InputError(
                    f'{name} is {value!r}, expected a quantity as Kubernetes writes it, in quotes: "2", 4Gi'
                )
        for name in ("cpu", "memory"):
            request, limit = getattr(self, f"{name}_request"), getattr(self, name)
            if quantity(request) > quantity(limit):
                raise InputError(f"{name}_request is {request}, more than {name}, the limit, which is {limit}")
        for name in ("gpus", "retries"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected a whole number, 0 or more")
        if not isinstance(self.timeout_s, int) or self.timeout_s < 1:
            raise InputError(f"timeout_s is {self.timeout_s!r}, expected seconds, 1 or more")


def quantity(text: str) -> float:
    """The number that Kubernetes reads: "250m" is 0.25, "1Gi" is 2**30."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    powers = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    return float(number) * powers.get(unit, 1)


# Requests are what the demo's steps need to start; they leave room for Kubeflow, MLflow and PostgreSQL on one node with
# 2 cores and 8 GiB, also with two trainer pods. Limits are what a step may use where the node has it.
LAPTOP: dict[str, StepPlacement] = {
    "open_run": StepPlacement(cpu="1", memory="1Gi", cpu_request="100m", memory_request="256Mi", timeout_s=600),
    "prepare_log": StepPlacement(cpu="2", memory="6Gi"),
    "generate_data": StepPlacement(cpu="2", memory="6Gi"),
    "merge_data": StepPlacement(cpu="1", memory="2Gi", memory_request="512Mi", timeout_s=3600),
    "profile_access": StepPlacement(cpu="2", memory="4Gi", memory_request="512Mi"),
    "plan_shards": StepPlacement(cpu="1", memory="2Gi", memory_request="512Mi", timeout_s=3600),
    "tune_ingest": StepPlacement(cpu="2", memory="4Gi", timeout_s=2 * 3600),
    "train_model": StepPlacement(
        cpu="2", memory="6Gi", process_memory_request="512Mi", shm="1Gi", timeout_s=24 * 3600, retries=3
    ),
    "report": StepPlacement(cpu="1", memory="2Gi", memory_request="512Mi", timeout_s=1800),
    "deploy_model": StepPlacement(cpu="1", memory="2Gi", memory_request="512Mi", timeout_s=1800),
    "compare_runs": StepPlacement(cpu="1", memory="2Gi", memory_request="512Mi", timeout_s=1800),
    "close_run": StepPlacement(cpu="1", memory="1Gi", cpu_request="100m", memory_request="256Mi", timeout_s=600),
}
LARGE = {"cpu": "8", "memory": "32Gi", "cpu_request": "4", "memory_request": "16Gi"}
SMALL = {"cpu": "4", "memory": "12Gi", "cpu_request": "2", "memory_request": "4Gi"}
HEAVY_STEPS = ("prepare_log", "generate_data", "profile_access", "tune_ingest", "train_model")


def _enlarged(steps: Mapping[str, StepPlacement], names: tuple[str, ...], **changes: Any) -> dict[str, StepPlacement]:
    return {name: replace(step, **changes) if name in names else step for name, step in steps.items()}


PROFILES: dict[str, dict[str, StepPlacement]] = {
    "laptop": LAPTOP,  # one node, 2 cores, 8 GiB
    "small": _enlarged(LAPTOP, HEAVY_STEPS, **SMALL),  # nodes with 4 cores and 16 GiB
    "gpu": _enlarged(  # nodes with 8 cores and 64 GiB, one of them with a GPU
        _enlarged(LAPTOP, HEAVY_STEPS, **LARGE), ("train_model",), gpus=1, shm="8Gi"
    ),
}

# Trainings whose speeds are compared get the same.
PLACED_LIKE = {"train_baseline": "train_model", "train_shared": "train_model"}


@dataclass(frozen=True, kw_only=True)
class ClusterPlacement:
    """Everything about a pipeline's pods except what they compute."""

    claim: str = "recmill-runs"  # the volume of the runs
    mount: str = "/runs"  # where steps see it
    secret: str = "recmill-mlflow"  # holds MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD
    tracking_uri: str = "http://mlflow:5000"
    worker_account: str = "recmill-worker"  # of pods that steps start
    gpu_type: str = "nvidia.com/gpu"
    executors: int = 2  # of Spark, each with what the step that starts them has
    image: str = ""  # of pods that the step starts: its own
    profile: str = "laptop"  # what steps get unless `steps` says otherwise
    steps: Mapping[str, StepPlacement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_credentials(self.tracking_uri, "tracking_uri")  # it is part of the pipeline's YAML

    def step(self, name: str) -> StepPlacement:
        name = PLACED_LIKE.get(name, name)
        return self.steps.get(name, PROFILES[self.profile][name])

    def with_step(self, name: str, **changes: Any) -> Self:
        """The same placement with one step changed."""
        return replace(self, steps={**self.steps, name: replace(self.step(name), **changes)})

    @staticmethod
    def labels(component: str) -> dict[str, str]:
        """Labels by which network policies select a pod; component is step, trainer or executor."""
        return {"app.kubernetes.io/part-of": "recmill", "app.kubernetes.io/component": component}

    def worker_pod(self, step: str = "train_model") -> dict[str, Any]:
        """A pod started by `step`, beyond image, command and resources: volumes, nodes, no privileges."""
        given = self.step(step)
        shm = {"medium": "Memory"} | ({"sizeLimit": given.shm} if given.shm else {})
        volumes: list[dict[str, Any]] = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "shm", "emptyDir": shm},
        ]
        mounts = {"runs": self.mount, "scratch": "/tmp", "shm": "/dev/shm"}
        spec: dict[str, Any] = {
            "serviceAccountName": self.worker_account,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": volumes,
            "containers": [
                {
                    "name": "node",
                    "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        }
        if given.node_selector:
            spec["nodeSelector"] = dict(given.node_selector)
        if given.tolerations:
            spec["tolerations"] = [toleration.to_manifest() for toleration in given.tolerations]
        return {"metadata": {"labels": self.labels("trainer")}, "spec": spec}

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Self:
        """The placement in a YAML file; `changes` replace top-level keys of it."""
        try:
            body = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            return cls.from_body(body | changes if isinstance(body, dict) else body, where=str(path))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{path}: cannot be read as a placement ({error})") from None

    @classmethod
    def from_environment(cls) -> Self:
        """The placement that the pipeline was compiled with, inside one of its steps."""
        return cls.from_body(json.loads(os.environ.get(VARIABLE, "{}")), where=VARIABLE)

    @classmethod
    def from_body(cls, body: Any, *, where: str) -> Self:
        if not isinstance(body, dict):
            raise InputError(f"{where}: expected a mapping of settings, received {type(body).__name__}")
        given = dict(body)
        steps = given.pop("steps", None) or {}
        unknown = [name for name in steps if name not in LAPTOP]
        if unknown:
            raise InputError(f"{where}: steps has {unknown[0]!r}, expected one of {', '.join(LAPTOP)}")
        _check_names(given, cls, where)
        profile = given.get("profile", "laptop")
        if profile not in PROFILES:
            raise InputError(f"{where}: profile is {profile!r}, expected one of {', '.join(PROFILES)}")
        defaults = PROFILES[profile]
        try:
            own = {
                name: _read_step(defaults[name], entry or {}, f"{where}: steps.{name}") for name, entry in steps.items()
            }
            return cls(**given, steps=own)
        except TypeError as error:
            raise InputError(f"{where}: {error}") from None


def _read_step(default: StepPlacement, entry: Mapping[str, Any], place: str) -> StepPlacement:
    given = dict(entry)
    _check_names(given, StepPlacement, place)
    for name in ("cpu", "memory"):  # a lower limit lowers the default request too
        limit = given.get(name)
        request = getattr(default, f"{name}_request")
        if isinstance(limit, str) and QUANTITY.fullmatch(limit) and quantity(limit) < quantity(request):
            given.setdefault(f"{name}_request", limit)
    if "tolerations" in given:
        given["tolerations"] = tuple(Toleration(**taint) for taint in given["tolerations"])
    try:
        return replace(default, **given)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _check_names(given: Mapping[str, Any], kind: type, where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{where}: has {unknown[0]!r}, expected one of {', '.join(known)}")
