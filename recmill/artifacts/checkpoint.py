"""checkpoint.json: a trained model on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from recmill.artifacts.manifest import Artifact
from recmill.artifacts.plan import SharedParameters


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Artifact):
    """A trained model: logical tables in row order, dense weights, optimiser state and ingest position."""

    kind: ClassVar[str] = "checkpoint"
    manifest_name: ClassVar[str] = "checkpoint.json"

    step: int
    config: Mapping[str, Any]  # the settings of TrainConfig
    schema: Mapping[str, Any]
    sharing: SharedParameters | None
    world_size: int
    run: Mapping[str, Any] = field(default_factory=dict)  # counters of the training loop
    ingest: Mapping[str, Any] = field(default_factory=dict)  # position of the reader
    metrics: Mapping[str, Any] | None = None  # of a finished model
    curve_crc32: int | None = None  # of the lines of metrics.jsonl until `step`

    def checked_by_readers(self) -> frozenset[str]:
        """Tensors have checksums per block, in a file that the manifest covers."""
        return frozenset(entry.name for entry in self.files if entry.name.endswith(".safetensors"))
