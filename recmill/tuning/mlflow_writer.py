"""SB3's training metrics in MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter

LogPoints = Callable[[list[tuple[str, float, int, float]]], None]


class MlflowWriter(KVWriter):
    """Writes what SB3 logs to a run: `agent/train/loss`, `agent/rollout/ep_rew_mean`, ..."""

    def __init__(self, log: LogPoints) -> None:
        """`log` receives (name, value, step, unix seconds) of every metric."""
        self._log = log

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        points = [
            (f"agent/{key}", float(value), step, time.time())
            for key, value in key_values.items()
            if isinstance(value, int | float | np.number) and np.isfinite(value)
        ]
        if points:
            self._log(points)

    def close(self) -> None:
        """The owner closes the run."""
