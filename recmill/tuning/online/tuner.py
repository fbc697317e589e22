"""Tuning during training: a thread that measures a pipeline, decides and resizes it in every interval."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from recmill.artifacts import InputError, WorkerAllocation
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.ingest.memory import available_memory_bytes
from recmill.tuning.agent import Agent
from recmill.tuning.cores import available_cores
from recmill.tuning.measurement import Measured, changed_conditions
from recmill.tuning.online.live import PipelineMeter, as_workers, default_slots
from recmill.tuning.policy import load_policy, refuse_archive

INTERVAL_S = 2.0
ITEMS_PER_LOOK = 4  # per worker: with fewer, an interval shows waves of workers that started together
MAX_INTERVAL_S = 10.0
MAX_HISTORY = 1_000  # entries: half an hour at the shortest interval; older ones thin out
# A trainer that waits for less than this share of its time gains nothing from tuning. Until it waits more, no agent
# is loaded: importing stable-baselines3 takes 2.4 s of CPU time.
IDLE_STALL = 0.02


class OnlineTuner:
    """Adjusts the workers of a pipeline while another thread reads its batches.

    Starts from `allocation`, if given, and keeps it until the reader waits. Detects changes of the CPU quota, the
    available memory, the storage and the trainer; `set_cores` and `set_memory_limit` take effect at once. The guard
    limits every decision.

        with IngestPipeline("dataset", batch_size=4096) as pipeline, OnlineTuner(pipeline) as tuner:
            for batch in pipeline:
                ...
        tuner.history()    # [{"t", "workers", "rows_per_s", "stall", "memory_bytes", "event", "controller"}]
    """

    def __init__(
        self,
        pipeline: IngestPipeline,
        *,
        allocation: WorkerAllocation | None = None,
        cores: int | None = None,
        interval_s: float = INTERVAL_S,
        agent: Agent | None = None,
        slots: int | None = None,
        num_sharing: int = 1,
    ) -> None:
        """`cores`: cores that ingestion may use (None: all cores of this process, checked in every interval, divided by
        the number of processes that share them, `num_sharing`).

        `agent`: decides from the start (None: one with the policy of the allocation or of the package, once the reader
        waits). `slots`: maximum number of workers of all stages together.
        """
        if interval_s <= 0:
            raise InputError(f"interval_s is {interval_s}, expected more than 0")
        if allocation and allocation.agent:
            refuse_archive(f"{allocation.path}/{allocation.agent}")
        self._pipeline, self._interval_s = pipeline, interval_s
        self._fixed_cores, self._num_sharing, self._slots = cores, num_sharing, slots
        self._agent, self._allocation = agent, allocation
        self._history: list[dict[str, Any]] = []
        self._events: list[str] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        if allocation:
            pipeline.set_workers({stage: count for stage, count in allocation.stages.items() if stage in STAGES})
        self._wanted_bytes = pipeline.memory_limit_bytes
        self.error: Exception | None = None

    def history(self) -> list[dict[str, Any]]:
        """Measurements and decisions, oldest first; `workers` are those during the interval."""
        with self._lock:
            return [dict(entry) for entry in self._history]

    def set_cores(self, cores: int) -> None:
        """Set the number of cores that ingestion may use from now on."""
        if cores < 1:
            raise InputError(f"cores is {cores}, expected at least 1")
        self._fixed_cores = cores

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Set the memory limit of ingestion; memory above it drains. Raises if the limit is too small."""
        self._pipeline.set_memory_limit(limit_bytes)
        self._wanted_bytes = limit_bytes

    def __enter__(self) -> OnlineTuner:
        self._stopped.clear()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ingest-tuner", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the thread; the workers stay as they are."""
        self._stopped.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._tune()
        except Exception as error:  # noqa: BLE001 - training continues with its workers; the history says why
            self.error = error
            self._note(None, event=f"tuning stopped: {error}", controller="none")

    def _tune(self) -> None:
        agent = self._agent
        meter = PipelineMeter(self._pipeline)
        last: Measured | None = None
        wait_s = self._interval_s
        while not self._stopped.wait(wait_s):
            self._follow_memory()
            cores = self._fixed_cores or max(1, available_cores() // self._num_sharing)
            measured = meter.measure(cores=cores, slots=self._slots or default_slots(cores))
            if measured is None:
                continue
            event = "; ".join([*self._events, *_describe_changes(last, measured)]) or None
            self._events.clear()
            if agent is None and measured.stall_B[0] > IDLE_STALL:
                agent, last = self._open_agent(), None
            if agent is None:
                self._note(measured, event=event, controller="none")
            else:
                if last is None:
                    agent.reset(measured)
                workers = as_workers(agent.decide(measured))
                decided_by = "linear programme" if agent.is_fallback_B[0] else "agent"
                self._note(measured, event=event, controller=decided_by)
                if workers != self._pipeline.workers:
                    self._pipeline.set_workers(workers)
            last, wait_s = measured, max(self._interval_s, min(MAX_INTERVAL_S, ITEMS_PER_LOOK * meter.longest_item_s))

    def _open_agent(self) -> Agent:
        if self._allocation is None or not self._allocation.agent:
            return Agent()
        return Agent(load_policy(f"{self._allocation.path}/{self._allocation.agent}"))

    def _follow_memory(self) -> None:
        """Lower the limit when the machine or control group has less memory left, raise it again when there is more."""
        held = int(self._pipeline.stats().get("memory", {}).get("bytes", 0))
        allowed = min(self._wanted_bytes, max(1, available_memory_bytes() + held))
        if abs(allowed - self._pipeline.memory_limit_bytes) < 0.05 * self._pipeline.memory_limit_bytes:
            return
        try:
            self._pipeline.set_memory_limit(allowed)
        except InputError as error:
            self._events.append(str(error))

    def _note(self, measured: Measured | None, *, event: str | None, controller: str) -> None:
        entry: dict[str, Any] = {
            "t": time.monotonic() - self._began,
            "workers": as_workers(measured.workers_BS) if measured else self._pipeline.workers,
            "rows_per_s": float(measured.rows_per_s_B[0]) if measured else 0.0,
            "stall": float(measured.stall_B[0]) if measured else 0.0,
            "memory_bytes": int(measured.memory_bytes_B[0]) if measured else 0,
            "event": event,
            "controller": controller,
        }
        with self._lock:
            self._history.append(entry)
            if len(self._history) > MAX_HISTORY:  # long runs keep every second entry of their past
                self._history = [*self._history[:-1:2], entry]


def _describe_changes(before: Measured | None, now: Measured) -> list[str]:
    """What changed outside the pipeline, as text."""
    if before is None or not changed_conditions(before, now)[0]:
        return []
    found = []
    if before.cores_B[0] != now.cores_B[0]:
        found.append(f"cores {before.cores_B[0]:g} to {now.cores_B[0]:g}")
    if before.limit_bytes_B[0] != now.limit_bytes_B[0]:
        found.append(f"memory limit {before.limit_bytes_B[0]:,.0f} to {now.limit_bytes_B[0]:,.0f} bytes")
    ratio_S = now.seconds_BS[0] / np.maximum(before.seconds_BS[0], 1e-12)
    most = int(np.argmax(np.abs(np.log(np.maximum(ratio_S, 1e-12)))))
    if not found and abs(np.log(ratio_S[most])) > np.log(1.2):
        found.append(f"{STAGES[most]} takes {ratio_S[most]:.2g} times as long")
    return found or [f"the trainer takes {now.demand_B[0] / max(before.demand_B[0], 1e-9):.2g} times as many rows"]
