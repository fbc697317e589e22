"""Progress of a training run, as checkpoints keep it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError


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


def read_curve(path: Path, step: int, crc32: int | None) -> list[dict[str, Any]]:
    """The losses until `step` that a run has logged. The last line may be half-written: the run was killed."""
    curve = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["step"] > step:
                break
            curve.append(entry)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, but the run has a checkpoint of step {step}") from None
    except (ValueError, LookupError, TypeError):
        pass  # the checksum says whether it matters
    if crc32 not in (None, zlib.crc32(curve_lines(curve).encode())):
        raise InputError(f"{path}: was changed after it was written")
    return curve


def curve_lines(curve: Sequence[Mapping[str, Any]]) -> str:
    """Losses as metrics.jsonl holds them."""
    return "".join(f"{json.dumps(entry)}\n" for entry in curve)
