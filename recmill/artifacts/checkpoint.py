"""A trained model on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recmill.artifacts.manifest import BodyArtifact


@dataclass(frozen=True, kw_only=True)
class Checkpoint(BodyArtifact):
    """A trained model: logical tables in row order, dense weights, optimiser state, ingest position.

    body: step, config, schema, world_size, metrics.
    """

    kind: ClassVar[str] = "checkpoint"
    manifest_name: ClassVar[str] = "checkpoint.json"

    def validate(self) -> None:
        self.require(step=int, config=dict, schema=dict)
