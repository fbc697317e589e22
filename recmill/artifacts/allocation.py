"""allocation.json: worker counts of the ingestion stages, and what they were measured to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar

from recmill.artifacts.manifest import Artifact
from recmill.artifacts.places.stores import InputError


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What a stage takes for one row group when nothing else runs."""

    seconds: float
    cpu_seconds: float
    rows: float = 0.0  # of that row group


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What the pipeline gave with some allocation and a consumer that never waits."""

    stages: Mapping[str, int]
    rows_per_s: float
    memory_bytes: int  # the peak that ingestion held
    num_rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all stages, for those rows


@dataclass(frozen=True, kw_only=True)
class TuningStep:
    """What the agent saw `t` seconds after it began to tune a running pipeline."""

    t: float
    workers: Mapping[str, int]
    rows_per_s: float
    stall: float  # share of the time that the consumer waited


@dataclass(frozen=True, kw_only=True)
class WorkerAllocation(Artifact, Throughput):
    """How many workers each ingestion stage gets, what that gives, and what the other candidates gave."""

    kind: ClassVar[str] = "allocation"
    manifest_name: ClassVar[str] = "allocation.json"

    baseline: Throughput  # one worker per stage
    agent: str | None  # the file of the tuned policy
    controller: str = ""  # the candidate that was chosen
    candidates: Mapping[str, Throughput] = field(default_factory=dict)
    stage_times: Mapping[str, StageTime] = field(default_factory=dict)
    history: tuple[TuningStep, ...] = ()
    cores: int = 1
    memory_limit_bytes: int = 0
    batch_size: int = 0

    def __post_init__(self) -> None:
        for stage, workers in self.stages.items():
            if workers < 1:
                raise InputError(f"stages.{stage} is {workers}, expected at least 1 worker")
        if self.agent is not None and PurePosixPath(self.agent).name != self.agent:
            raise InputError(f"agent is {self.agent!r}, expected the name of a file of this folder")

    def named_files(self) -> frozenset[str]:
        return frozenset([self.agent] if self.agent else [])
