"""Progress of a training run, as checkpoints keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class RunState:
    """Progress of a run. Part of every checkpoint, so that a resumed run continues as if never stopped."""

    step: int = 0
    num_samples: int = 0
    seconds: float = 0.0  # training only: evaluation and saving do not count
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best_auc: float = -math.inf
    num_worse: int = 0  # evaluations since the best one
    is_stopped: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "best_auc": self.best_auc if math.isfinite(self.best_auc) else None}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> RunState:
        best = loaded["best_auc"]
        return cls(**{**loaded, "best_auc": -math.inf if best is None else best})
