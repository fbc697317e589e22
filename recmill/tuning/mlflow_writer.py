"""SB3's training metrics in MLflow."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter


class MlflowWriter(KVWriter):
    """Writes what SB3 logs to a run: `agent/train/loss`, `agent/rollout/ep_rew_mean`, ..."""

    def __init__(self, client: Any, run_id: str, *, prefix: str = "agent/") -> None:
        """`client`: an mlflow.MlflowClient. The owner of the run closes it."""
        self._client, self._run_id, self._prefix = client, run_id, prefix

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(key=self._prefix + key, value=float(value), timestamp=now_ms, step=step)
            for key, value in key_values.items()
            if isinstance(value, int | float | np.number) and np.isfinite(value)
        ]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """The owner closes the run."""
