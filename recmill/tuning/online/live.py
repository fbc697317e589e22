"""Measurements of a real pipeline for controllers, from its counters, interval by interval."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from recmill.data.ingest import STAGES, IngestPipeline
from recmill.tuning.measurement import Ints, Measured

MIN_SLOTS = 64  # stages that wait for storage need more workers than cores
SLOTS_PER_CORE = 4
ITEMS_PER_WORKER = 2  # row groups that the pipeline reads ahead per worker
_NOTHING = dict.fromkeys(("rows", "seconds", "cpu_seconds", "queued_seconds"), 0.0)


def default_slots(cores: float) -> int:
    return max(MIN_SLOTS, int(SLOTS_PER_CORE * cores))


class PipelineMeter:
    """Differences between two readings of a pipeline's statistics."""

    def __init__(self, pipeline: IngestPipeline) -> None:
        self._pipeline = pipeline
        self._last: Mapping[str, Any] = {}
        self._seconds_S = np.zeros(len(STAGES))
        self._cpu_S = np.zeros(len(STAGES))
        self.looked_at = time.monotonic()
        self.longest_item_s = 0.0

    def measure(self, *, cores: float, slots: int) -> Measured | None:
        """Measurements since the last reading; None until there are two and every stage but the last has run."""
        stats, before, self.looked_at = self._pipeline.stats(), self._last, time.monotonic()
        if "consumer" not in stats:
            return None
        self._last = stats
        if not before or stats["consumer"]["seconds"] <= before["consumer"]["seconds"]:
            return None
        self._update_times(before, stats)
        self.longest_item_s = max(stats[stage]["seconds_per_item"] for stage in STAGES)
        if not self._seconds_S[:-1].all():
            return None
        if not self._seconds_S[-1]:
            # The first batch needs several row groups: until then assume the fastest stage's time.
            self._seconds_S[-1] = self._seconds_S[:-1].min()
            self._cpu_S[-1] = self._seconds_S[-1]
        consumer, old = stats["consumer"], before["consumer"]
        elapsed_s = consumer["seconds"] - old["seconds"]
        limit_bytes = float(self._pipeline.memory_limit_bytes)
        return Measured(
            workers_BS=np.array([[stats[stage]["workers"] for stage in STAGES]], dtype=np.int64),
            seconds_BS=self._seconds_S[None].copy(),
            cpu_BS=self._cpu_S[None].copy(),
            queue_BS=np.array([[float(stats[stage]["queue_fill"]) for stage in STAGES]]),
            rows_per_s_B=np.array([(consumer["rows"] - old["rows"]) / elapsed_s]),
            stall_B=np.clip([(consumer["stall_seconds"] - old["stall_seconds"]) / elapsed_s], 0.0, 1.0),
            cores_B=np.array([float(cores)]),
            slots_B=np.array([slots]),
            item_bytes_BS=np.full((1, len(STAGES)), float(ITEMS_PER_WORKER * self._pipeline.item_bytes)),
            base_bytes_B=np.array([float(min(self._pipeline.least_bytes, limit_bytes))]),
            memory_bytes_B=np.array([float(stats["memory"]["bytes"])]),
            limit_bytes_B=np.array([limit_bytes]),
        )

    def _update_times(self, before: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        """Seconds per row of each stage; a stage that finished nothing keeps its last value.

        For a stage without a value, all its work so far counts: reading may have finished its read-ahead before the
        first reading.
        """
        for position, stage in enumerate(STAGES):
            now, old = stats[stage], before[stage] if self._seconds_S[position] else _NOTHING
            rows = now["rows"] - old["rows"]
            if rows <= 0:
                continue
            cpu_s = max(1e-12, now["cpu_seconds"] - old["cpu_seconds"])
            queued_s = now["queued_seconds"] - old["queued_seconds"]
            self._seconds_S[position] = max(cpu_s, now["seconds"] - old["seconds"] - queued_s) / rows
            self._cpu_S[position] = cpu_s / rows


def as_workers(workers_BS: Ints) -> dict[str, int]:
    """Workers by stage of a single pipeline."""
    return {stage: int(count) for stage, count in zip(STAGES, workers_BS[0], strict=True)}
