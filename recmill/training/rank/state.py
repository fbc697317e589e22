"""Progress of a training run, as checkpoints keep it."""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, explain_write_errors, is_remote, write_text_atomically
from recmill.artifacts.places.stores import read_bytes

COLUMNS = {"step": "q", "samples": "q", "seconds": "d", "loss": "d"}  # of metrics.jsonl


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


class LossCurve:
    """The losses of a run, in memory and in metrics.jsonl. Rank 0 writes the file.

    A local file grows with every call of `add`. A store's files cannot grow, so there it is written with checkpoints.
    """

    def __init__(self, path: str, *, writes: bool) -> None:
        self._columns = {name: array(code) for name, code in COLUMNS.items()}  # 32 bytes per step, a dictionary 400
        self.crc32 = 0  # of all lines
        self._path, self._writes = path, writes

    @property
    def entries(self) -> list[dict[str, Any]]:
        rows = zip(*self._columns.values(), strict=True)
        return [dict(zip(COLUMNS, row, strict=True)) for row in rows]

    def _append(self, new: Sequence[Mapping[str, Any]]) -> None:
        for name, column in self._columns.items():
            column.extend([entry[name] for entry in new])

    def add(self, new: Sequence[dict[str, Any]]) -> None:
        lines = curve_lines(new)
        self._append(new)
        self.crc32 = zlib.crc32(lines.encode(), self.crc32)
        if self._writes and not is_remote(self._path):
            with explain_write_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.write(lines)

    def written(self) -> Callable[[], None]:
        """A function that makes the file contain the losses until now, if it does not."""
        if not is_remote(self._path):
            return lambda: None
        text = curve_lines(self.entries)
        return lambda: write_text_atomically(self._path, text)

    def restore(self, step: int, crc32: int | None) -> None:
        """Go back to `step`: later losses are logged again."""
        if self._writes:
            self._append(found := read_curve(self._path, step, crc32))
            text = curve_lines(found)
            self.crc32 = zlib.crc32(text.encode())
            write_text_atomically(self._path, text)


def read_curve(path: str | Path, step: int, crc32: int | None) -> list[dict[str, Any]]:
    """The losses until `step` that a run has logged. The last line may be half-written: the run was killed."""
    curve = []
    try:
        for line in read_bytes(path).decode("utf-8").splitlines():
            entry = json.loads(line)
            if entry["step"] > step:
                break
            curve.append(entry)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, but the run has a checkpoint of step {step}") from None
    except InputError:
        raise
    except (ValueError, LookupError, TypeError):
        pass  # the checksum says whether it matters
    if crc32 not in (None, zlib.crc32(curve_lines(curve).encode())):
        raise InputError(f"{path}: was changed after it was written")
    return curve


def curve_lines(curve: Sequence[Mapping[str, Any]]) -> str:
    """Losses as metrics.jsonl holds them."""
    return "".join(f"{json.dumps(entry)}\n" for entry in curve)
