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

from recmill.artifacts import InputError

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
    """What the pod of one step gets. cpu and memory are both request and limit, so that they are guaranteed."""

    cpu: str = "2"
    memory: str = "4Gi"
    gpus: int = 0
    shm: str = ""  # size of /dev/shm, where processes of one pod share memory; a container has 64 MiB by default
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout_s: int = 6 * 3600
    retries: int = 2

    @property
    def cores(self) -> int:
        """Whole cores, at least one."""
        cores = float(self.cpu.removesuffix("m")) / (1000 if self.cpu.endswith("m") else 1)
        return max(1, int(cores))

    @property
    def memory_mib(self) -> int:
        number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", self.memory).groups()  # type: ignore[union-attr]
        powers = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
        return int(float(number) * powers.get(unit, 1)) // 2**20

    def __post_init__(self) -> None:
        for name in ("cpu", "memory", "shm"):
            value = getattr(self, name)
            if (value or name != "shm") and not (isinstance(value, str) and QUANTITY.fullmatch(value)):
                raise InputError(
                    f'{name} is {value!r}, expected a quantity as Kubernetes writes it, in quotes: "2", 4Gi'
                )
        for name in ("gpus", "retries"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected a whole number, 0 or more")
        if not isinstance(self.timeout_s, int) or self.timeout_s < 1:
            raise InputError(f"timeout_s is {self.timeout_s!r}, expected seconds, 1 or more")


DEFAULT_STEPS: dict[str, StepPlacement] = {
    "generate_data": StepPlacement(cpu="2", memory="6Gi"),
    "merge_data": StepPlacement(cpu="1", memory="2Gi", timeout_s=3600),
    "profile_access": StepPlacement(cpu="2", memory="4Gi"),
    "plan_shards": StepPlacement(cpu="1", memory="2Gi", timeout_s=3600),
    "tune_ingest": StepPlacement(cpu="2", memory="4Gi", timeout_s=2 * 3600),
    "train_model": StepPlacement(cpu="2", memory="6Gi", shm="1Gi", timeout_s=24 * 3600, retries=3),
    "report": StepPlacement(cpu="1", memory="2Gi", timeout_s=1800),
    "compare_runs": StepPlacement(cpu="1", memory="2Gi", timeout_s=1800),
    "close_run": StepPlacement(cpu="250m", memory="1Gi", timeout_s=600),
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
    executors: int = 2  # of Spark, each with what generate_data has
    image: str = ""  # of pods that the step starts: its own
    steps: Mapping[str, StepPlacement] = field(default_factory=dict)

    def step(self, name: str) -> StepPlacement:
        name = PLACED_LIKE.get(name, name)
        return self.steps.get(name, DEFAULT_STEPS[name])

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
    def load(cls, path: str | Path) -> Self:
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_body(yaml.safe_load(text) or {}, where=str(path))
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
        unknown = [name for name in steps if name not in DEFAULT_STEPS]
        if unknown:
            raise InputError(f"{where}: steps has {unknown[0]!r}, expected one of {', '.join(DEFAULT_STEPS)}")
        _check_names(given, cls, where)
        try:
            return cls(**given, steps={name: _read_step(name, entry or {}, where) for name, entry in steps.items()})
        except TypeError as error:
            raise InputError(f"{where}: {error}") from None


def _read_step(name: str, entry: Mapping[str, Any], where: str) -> StepPlacement:
    given = dict(entry)
    place = f"{where}: steps.{name}"
    _check_names(given, StepPlacement, place)
    if "tolerations" in given:
        given["tolerations"] = tuple(Toleration(**taint) for taint in given["tolerations"])
    try:
        return replace(DEFAULT_STEPS[name], **given)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _check_names(given: Mapping[str, Any], kind: type, where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{where}: has {unknown[0]!r}, expected one of {', '.join(known)}")
