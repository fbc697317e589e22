"""How many workers each ingestion stage gets, and what that was measured to give.

The static answer is the even split of the cores. It is what the tuned allocations have to beat, so its figures are
recorded together with those of one worker a stage.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recmill.artifacts import Dataset, InputError, WorkerAllocation, write_folder
from recmill.data.batch import assemble_batch
from recmill.data.ingest.memory import default_memory_limit
from recmill.data.ingest.pipeline import IngestPipeline
from recmill.data.ingest.splits import ALL_ROWS, split_groups
from recmill.data.ingest.stages import STAGES, open_reader
from recmill.data.schema import Schema
from recmill.progress import Progress, no_progress

NUM_PROBED_GROUPS = 8
WARM_UP_S = 0.2
MEASURE_S = 2.0
MAX_EPOCHS = 1_000  # small data are read again and again until the time is up
ONE_WORKER = dict.fromkeys(STAGES, 1)


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What a stage takes for one row group when nothing else runs."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What the pipeline gave with some allocation and a consumer that never waits."""

    stages: Mapping[str, int]
    rows_per_s: float
    memory_bytes: int  # the peak that ingestion held
    num_rows: int
    seconds: float


def tune_ingest(
    data: Dataset | str | Path,
    *,
    out: str | Path,
    cores: int | None = None,
    memory_limit_bytes: int | None = None,
    batch_size: int = 4096,
    progress: Progress = no_progress,
) -> WorkerAllocation:
    """Measure the stages on this machine, split the cores evenly over them and write what that gives."""
    dataset = data if isinstance(data, Dataset) else Dataset.load(data)
    cores = available_cores() if cores is None else cores
    if cores < 1:
        raise InputError(f"cores is {cores}, expected at least 1")
    limit_bytes = memory_limit_bytes or default_memory_limit()
    with write_folder(out, manifest_name=WorkerAllocation.manifest_name) as folder:
        times = measure_stages(dataset, batch_size=batch_size, progress=progress)
        stages = split_evenly(cores, times)
        options = {"batch_size": batch_size, "memory_limit_bytes": limit_bytes}
        progress("measure allocations", 0, 2)
        baseline = measure_throughput(dataset, workers=ONE_WORKER, **options)
        progress("measure allocations", 1, 2)
        chosen = baseline if stages == ONE_WORKER else measure_throughput(dataset, workers=stages, **options)
        progress("measure allocations", 2, 2)
        body: dict[str, Any] = {
            "controller": "even_split",
            **asdict(chosen),
            "baseline": asdict(baseline),
            "stage_times": {stage: asdict(taken) for stage, taken in times.items()},
            "cores": cores,
            "memory_limit_bytes": limit_bytes,
            "batch_size": batch_size,
        }
        WorkerAllocation.seal(folder, body=body, inputs={"dataset": dataset.content_hash})
    return WorkerAllocation.load(out)


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores this process may use: its CPU affinity, or the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota_file = cgroup_root / "cpu.max"
    quota, period = quota_file.read_text(encoding="utf-8").split() if quota_file.is_file() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def split_evenly(cores: int, times: Mapping[str, StageTime]) -> dict[str, int]:
    """As many workers as cores, the same for every stage and at least one; the slowest stages share the remainder."""
    each, remainder = divmod(cores, len(STAGES))
    slowest = sorted(STAGES, key=lambda stage: -times[stage].cpu_seconds)[:remainder] if each else []
    return {stage: max(1, each) + (stage in slowest) for stage in STAGES}


def measure_stages(dataset: Dataset, *, batch_size: int, progress: Progress = no_progress) -> dict[str, StageTime]:
    """The median time of every stage for one row group, one after the other in this thread."""
    schema = Schema.load(dataset.path)
    groups = split_groups(dataset, ALL_ROWS)
    probed = groups[:: max(1, len(groups) // NUM_PROBED_GROUPS)][:NUM_PROBED_GROUPS]
    reader = open_reader(dataset, schema)
    taken: dict[str, list[StageTime]] = {stage: [] for stage in STAGES}
    for done, group in enumerate(probed):
        progress("time stages", done, len(probed))
        clock = _Clock()
        raw = reader.read(group)
        taken["read"].append(clock.lap())
        table = reader.decode(group, raw)
        taken["decode"].append(clock.lap())
        block = reader.transform(group, table)
        taken["transform"].append(clock.lap())
        for start in range(0, len(block), batch_size):
            rows = (block, start, min(len(block), start + batch_size))
            assemble_batch([rows], schema, num_global=batch_size)
        taken["batch"].append(clock.lap())
    progress("time stages", len(probed), len(probed))
    reader.close()
    return {
        stage: StageTime(
            seconds=statistics.median(entry.seconds for entry in entries),
            cpu_seconds=statistics.median(entry.cpu_seconds for entry in entries),
        )
        for stage, entries in taken.items()
    }


class _Clock:
    """Wall and CPU time since the last lap."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def lap(self) -> StageTime:
        wall, cpu = time.perf_counter(), time.thread_time()
        taken = StageTime(seconds=wall - self._wall, cpu_seconds=cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        return taken


def measure_throughput(
    dataset: Dataset,
    *,
    workers: Mapping[str, int],
    batch_size: int,
    memory_limit_bytes: int,
    measure_s: float = MEASURE_S,
) -> Throughput:
    """Rows a second over `measure_s`, after a short warm-up, reading the data again where it is small."""
    with IngestPipeline(
        dataset,
        split=ALL_ROWS,
        batch_size=batch_size,
        epochs=MAX_EPOCHS,
        workers=workers,
        memory_limit_bytes=memory_limit_bytes,
    ) as pipeline:
        started, num_rows, is_warm = time.perf_counter(), 0, False
        for batch in pipeline:
            num_rows += len(batch)
            elapsed_s = time.perf_counter() - started
            if not is_warm and elapsed_s >= WARM_UP_S:
                started, num_rows, is_warm = time.perf_counter(), 0, True
            elif is_warm and elapsed_s >= measure_s:
                break
        seconds = time.perf_counter() - started
        peak_bytes = pipeline.stats()["memory"]["peak_bytes"]
    return Throughput(
        stages=dict(workers),
        rows_per_s=num_rows / seconds,
        memory_bytes=peak_bytes,
        num_rows=num_rows,
        seconds=seconds,
    )
