"""Real pipelines tuned at run time: slow reads, two slow stages on many slots, and events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from intune_data import hash_rows, late_rate

from recmill.artifacts import Dataset
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.ingest.splits import ALL_ROWS
from recmill.tuning.agent import Agent
from recmill.tuning.online.tuner import OnlineTuner

ONE = dict.fromkeys(STAGES, 1)
SLOW_STAGES = {"decode": 0.17, "transform": 0.21}  # seconds without using a core, like calls to a service
MEMORY_BYTES = 2 * 2**30


def open_pipeline(dataset: Dataset, *, batch_size: int, epochs: int = 1, **options: Any) -> IngestPipeline:
    return IngestPipeline(
        dataset, split=ALL_ROWS, batch_size=batch_size, epochs=epochs, memory_limit_bytes=MEMORY_BYTES, **options
    )


def epoch_rate(dataset: Dataset, workers: Mapping[str, int], *, batch_size: int, epochs: int, **options: Any) -> float:
    """Rows per second over whole epochs, from the first read."""
    with open_pipeline(dataset, batch_size=batch_size, epochs=epochs, workers=workers, **options) as pipeline:
        began = time.perf_counter()
        num_rows = sum(len(batch) for batch in pipeline)
        return num_rows / (time.perf_counter() - began)


def late_reads(dataset: Dataset, agent: Agent, *, delay_s: float, seconds: float, interval_s: float) -> dict[str, Any]:
    """Rows per second with one worker per stage, and after tuning that pipeline for `seconds`."""
    slow = _run_for(dataset, delay_s, seconds=min(3.0, seconds / 3), agent=None, interval_s=interval_s)[0]
    tuned, history = _run_for(dataset, delay_s, seconds=seconds, agent=agent, interval_s=interval_s)
    reached = [entry["t"] for entry in history if entry["rows_per_s"] >= 10 * slow]
    return {"one_worker": slow, "tuned": tuned, "seconds_to_10x": min(reached, default=None), "history": history}


def _run_for(
    dataset: Dataset, delay_s: float, *, seconds: float, agent: Agent | None, interval_s: float
) -> tuple[float, list[dict[str, Any]]]:
    """The rate of the last third of the time."""
    delays_s = {"read": delay_s}
    with open_pipeline(dataset, batch_size=512, epochs=1_000, workers=ONE, delays_s=delays_s) as pipeline:
        tuner = OnlineTuner(pipeline, agent=agent, interval_s=interval_s) if agent else None
        if tuner:
            tuner.__enter__()
        rate = late_rate(map(len, pipeline), seconds=seconds)
        if tuner:
            tuner.stop()
        return rate, tuner.history() if tuner else []


def two_stages(dataset: Dataset, agent: Agent | None, *, epochs: int, slots: int, interval_s: float) -> dict[str, Any]:
    """Seconds for all row groups with hand-set workers (no agent), or tuned from one worker per stage."""
    share = SLOW_STAGES["decode"] / sum(SLOW_STAGES.values())
    preset = ONE | {"decode": round(slots * share), "transform": slots - round(slots * share)}
    workers = ONE if agent else preset
    with open_pipeline(dataset, batch_size=64, epochs=epochs, workers=workers, delays_s=SLOW_STAGES) as pipeline:
        # Reading and cutting batches take one worker each beside the two stages that share the slots.
        tuner = OnlineTuner(pipeline, agent=agent, interval_s=interval_s, slots=slots + 2) if agent else None
        began = time.perf_counter()
        if tuner:
            tuner.__enter__()
        num_rows = sum(len(batch) for batch in pipeline)
        seconds = time.perf_counter() - began
        if tuner:
            tuner.stop()
        return {"seconds": seconds, "rows": num_rows, "workers": pipeline.workers}


def live_events(dataset: Dataset, agent: Agent, *, phase_s: float, interval_s: float) -> dict[str, Any]:
    """One run through slower storage, a slower trainer, fewer cores and less memory: rates before and after each."""
    pause_s = [0.0]

    def slower_storage(_: OnlineTuner) -> None:
        pipeline.set_delays({"read": 0.02})

    def slower_trainer(_: OnlineTuner) -> None:
        pause_s[0] = 0.03

    def fewer_cores(tuner: OnlineTuner) -> None:
        tuner.set_cores(1)

    def less_memory(tuner: OnlineTuner) -> None:
        tuner.set_memory_limit(MEMORY_BYTES // 4)

    events: list[Callable[[OnlineTuner], None]] = [slower_storage, slower_trainer, fewer_cores, less_memory]
    with (
        open_pipeline(dataset, batch_size=512, epochs=1_000, workers=ONE) as pipeline,
        OnlineTuner(pipeline, agent=agent, interval_s=interval_s) as tuner,
    ):
        began, phase = time.perf_counter(), 0
        for _ in pipeline:
            time.sleep(pause_s[0])
            if time.perf_counter() - began >= (phase + 1) * phase_s:
                if phase == len(events):
                    break
                events[phase](tuner)
                phase += 1
        peak_bytes, limit_bytes = (pipeline.stats()["memory"][name] for name in ("peak_bytes", "limit_bytes"))
    history = tuner.history()
    phases = []
    for index, name in enumerate(["start", *(event.__name__ for event in events)]):
        rates = [e["rows_per_s"] for e in history if index * phase_s <= e["t"] < (index + 1) * phase_s]
        settled = statistics.median(rates[len(rates) // 2 :]) if rates else 0.0
        first = next((number for number, rate in enumerate(rates) if rate >= 0.9 * settled), None)
        last = [e["workers"] for e in history if e["t"] < (index + 1) * phase_s]
        phases.append(
            {
                "phase": name,
                "rows_per_s": settled,
                "decisions_to_90": first,
                "seconds_to_90": None if first is None else (first + 1) * interval_s,
                "workers": last[-1] if last else ONE,
            }
        )
    noticed = [entry["event"] for entry in history if entry["event"]]
    return {"phases": phases, "noticed": noticed, "peak_bytes": peak_bytes, "limit_bytes": limit_bytes}


def hash_of(dataset: Dataset, *, batch_size: int, **options: Any) -> tuple[int, int]:
    with open_pipeline(dataset, batch_size=batch_size, **options) as pipeline:
        return hash_rows(pipeline)
