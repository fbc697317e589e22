"""Chooses the number of workers per ingestion stage and measures the result.

Stages are timed alone, and the agent tunes a running pipeline. Its best allocation is measured against the linear
programme's answer, the even split and one worker per stage. The fastest is written, with the measurements of all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.artifacts import Dataset, InputError, WorkerAllocation, write_folder
from recmill.artifacts.allocation import StageTime, Throughput, TuningStep
from recmill.data.ingest.memory import default_memory_limit
from recmill.data.ingest.pipeline import IngestPipeline
from recmill.data.ingest.reader import STAGES
from recmill.data.ingest.splits import ALL_ROWS
from recmill.progress import Progress, no_progress
from recmill.tuning.cores import available_cores
from recmill.tuning.measurement import Limits
from recmill.tuning.online.live import as_workers, default_slots
from recmill.tuning.online.tuner import OnlineTuner
from recmill.tuning.programme import solve_workers
from recmill.tuning.simulation.stage_times import MAX_EPOCHS, ONE_WORKER, measure_stages, measure_throughput

if TYPE_CHECKING:
    from recmill.tuning.mlflow_writer import LogPoints

AGENT_FILE = "agent.safetensors"
DEFAULT_SECONDS = 7.0  # of measuring; on small data, starting pipelines takes about as long again
NUM_TURNS = 3  # repetitions of measuring the allocations
ALIKE = 0.03  # rates within this share count as equal: the allocation with fewer workers wins


def tune_ingest(
    data: Dataset | str | Path,
    *,
    out: str | Path,
    cores: int | None = None,
    memory_limit_bytes: int | None = None,
    batch_size: int = 4096,
    seconds: float = DEFAULT_SECONDS,
    log: LogPoints | None = None,
    progress: Progress = no_progress,
) -> WorkerAllocation:
    """Choose the workers per stage on this machine in about `seconds` and write them with their measurements.

    `log` receives SB3's metrics of the agent's learning (see mlflow_writer.py).
    """
    dataset = data if isinstance(data, Dataset) else Dataset.load(data)
    cores = available_cores() if cores is None else cores
    if cores < 1:
        raise InputError(f"cores is {cores}, expected at least 1")
    if seconds <= 0:
        raise InputError(f"seconds is {seconds}, expected more than 0")
    limit_bytes = memory_limit_bytes or default_memory_limit()
    options: dict[str, Any] = {"batch_size": batch_size, "memory_limit_bytes": limit_bytes}
    with write_folder(out, manifest_name=WorkerAllocation.manifest_name) as folder:
        times = measure_stages(dataset, batch_size=batch_size, progress=progress)
        history, settled = _tune_live(
            dataset, folder, cores=cores, seconds=seconds / 2, log=log, progress=progress, **options
        )
        candidates = {
            "one worker per stage": ONE_WORKER,
            "even split": split_evenly(cores, times),
            "linear programme": _programme(times, cores),
            "agent": settled,
        }
        measured = _measure_all(
            dataset, candidates, measure_s=seconds / 2 / len(candidates), progress=progress, **options
        )
        chosen = _choose(measured)
        WorkerAllocation(
            controller=chosen,
            **vars(measured[chosen]),
            baseline=measured["one worker per stage"],
            candidates=measured,
            stage_times=times,
            history=tuple(history),
            agent=AGENT_FILE,
            cores=cores,
            memory_limit_bytes=limit_bytes,
            batch_size=batch_size,
            inputs={"dataset": dataset.content_hash},
        ).seal(folder)
    return WorkerAllocation.load(out)


def split_evenly(cores: int, times: Mapping[str, StageTime]) -> dict[str, int]:
    """As many workers as cores: the same number per stage, at least one; the slowest stages get the remainder."""
    each, remainder = divmod(cores, len(STAGES))
    slowest = sorted(STAGES, key=lambda stage: -times[stage].cpu_seconds)[:remainder] if each else []
    return {stage: max(1, each) + (stage in slowest) for stage in STAGES}


def _tune_live(
    dataset: Dataset,
    folder: Path,
    *,
    cores: int,
    seconds: float,
    log: LogPoints | None,
    progress: Progress,
    **options: Any,
) -> tuple[list[TuningStep], dict[str, int]]:
    """Let the agent tune a pipeline whose consumer is never busy; returns the history and the best allocation."""
    from recmill.tuning.agent import Agent
    from recmill.tuning.mlflow_writer import MlflowWriter
    from recmill.tuning.online.learning import OnlineLearner
    from recmill.tuning.policy import load_policy, save_policy

    policy = load_policy()
    writers = (MlflowWriter(log),) if log else ()
    agent = Agent(learner=OnlineLearner(policy, writers=writers))
    pipeline = IngestPipeline(dataset, split=ALL_ROWS, epochs=MAX_EPOCHS, workers=ONE_WORKER, **options)
    with pipeline, OnlineTuner(pipeline, agent=agent, cores=cores, interval_s=max(0.1, seconds / 24)) as tuner:
        began = time.monotonic()
        for _ in pipeline:
            elapsed_s = time.monotonic() - began
            progress("tune a running pipeline", min(int(elapsed_s * 10), int(seconds * 10)), int(seconds * 10))
            if elapsed_s >= seconds and tuner.history():
                break
    progress("tune a running pipeline", int(seconds * 10), int(seconds * 10))
    if tuner.error:
        raise tuner.error
    save_policy(policy, folder / AGENT_FILE)
    history = [
        TuningStep(t=entry["t"], workers=entry["workers"], rows_per_s=entry["rows_per_s"], stall=entry["stall"])
        for entry in tuner.history()
    ]
    return history, _best_of(history)


def _best_of(history: Sequence[TuningStep]) -> dict[str, int]:
    """The allocation with the highest mean rate over its intervals."""
    rates: dict[tuple[int, ...], list[float]] = {}
    for entry in history:
        rates.setdefault(tuple(entry.workers[stage] for stage in STAGES), []).append(entry.rows_per_s)
    if not rates:
        return dict(ONE_WORKER)
    best = max(rates, key=lambda workers: sum(rates[workers]) / len(rates[workers]))
    return dict(zip(STAGES, best, strict=True))


def _programme(times: Mapping[str, StageTime], cores: int) -> dict[str, int]:
    """The linear programme's answer for stages timed alone, without a memory limit: credits enforce that."""
    seconds_BS = np.array([[times[stage].seconds / max(1.0, times[stage].rows) for stage in STAGES]])
    cpu_BS = np.array([[times[stage].cpu_seconds / max(1.0, times[stage].rows) for stage in STAGES]])
    limits = Limits(
        cores_B=np.array([float(cores)]),
        slots_B=np.array([default_slots(cores)]),
        item_bytes_BS=np.zeros_like(cpu_BS),
        base_bytes_B=np.zeros(1),
        limit_bytes_B=np.ones(1),
    )
    return as_workers(solve_workers(seconds_BS, cpu_BS, limits)[0])


def _measure_all(
    dataset: Dataset,
    candidates: Mapping[str, Mapping[str, int]],
    *,
    measure_s: float,
    progress: Progress,
    **options: Any,
) -> dict[str, Throughput]:
    """The rate of each allocation, measured in turns; equal allocations are measured once."""
    keys = {name: tuple(sorted(workers.items())) for name, workers in candidates.items()}
    taken: dict[tuple[tuple[str, int], ...], list[Throughput]] = {key: [] for key in keys.values()}
    for turn in range(NUM_TURNS):
        for done, key in enumerate(taken):
            progress("measure allocations", turn * len(taken) + done, NUM_TURNS * len(taken))
            taken[key].append(
                measure_throughput(dataset, workers=dict(key), measure_s=measure_s / NUM_TURNS, **options)
            )
    progress("measure allocations", NUM_TURNS * len(taken), NUM_TURNS * len(taken))
    return {name: _joined(taken[key], candidates[name]) for name, key in keys.items()}


def _joined(turns: Sequence[Throughput], workers: Mapping[str, int]) -> Throughput:
    """All turns of an allocation: the median of the rates, because other work on the machine disturbs some of them."""
    return Throughput(
        stages=dict(workers),
        rows_per_s=statistics.median(turn.rows_per_s for turn in turns),
        memory_bytes=max(turn.memory_bytes for turn in turns),
        num_rows=sum(turn.num_rows for turn in turns),
        seconds=sum(turn.seconds for turn in turns),
        cpu_seconds=sum(turn.cpu_seconds for turn in turns),
    )


def _choose(measured: Mapping[str, Throughput]) -> str:
    best = max(found.rows_per_s for found in measured.values())
    alike = [name for name, found in measured.items() if found.rows_per_s >= (1 - ALIKE) * best]
    return min(alike, key=lambda name: sum(measured[name].stages.values()))
