"""Worker counts of the ingestion stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recmill.artifacts.files import InputError
from recmill.artifacts.manifest import Artifact


@dataclass(frozen=True, kw_only=True)
class WorkerAllocation(Artifact):
    """How many workers each ingestion stage gets. body: stages, rows_per_s, memory_bytes, baseline."""

    kind: ClassVar[str] = "allocation"
    manifest_name: ClassVar[str] = "allocation.json"

    def validate(self) -> None:
        self.require(stages=dict, rows_per_s=float, memory_bytes=float)
        for stage, workers in self.body["stages"].items():
            if type(workers) is not int or workers < 1:
                raise InputError(
                    f"{self.path}/allocation.json: stage {stage!r} has {workers!r} workers, expected at least 1"
                )

    @property
    def stages(self) -> dict[str, int]:
        return dict(self.body["stages"])
