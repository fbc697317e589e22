"""Times of the ingestion stages on this machine, alone and together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from recmill.artifacts import Dataset
from recmill.artifacts.allocation import StageTime, Throughput
from recmill.data.ikjt.batch import assemble_batch
from recmill.data.ingest.pipeline import IngestPipeline
from recmill.data.ingest.reader import STAGES, RowGroupReader
from recmill.data.ingest.splits import ALL_ROWS, split_groups
from recmill.data.ingest.statistics import Clock, Taken
from recmill.data.schema import Schema
from recmill.progress import Progress, no_progress

NUM_PROBED_GROUPS = 8
WARM_UP_S = 0.1
MAX_LONGER_S = 0.5  # extra time to complete a round
MAX_EPOCHS = 1_000  # small data is read repeatedly until the time is up
ONE_WORKER = dict.fromkeys(STAGES, 1)


def measure_stages(dataset: Dataset, *, batch_size: int, progress: Progress = no_progress) -> dict[str, StageTime]:
    """The median time of every stage for one row group, one after the other in this thread."""
    schema = Schema.load(dataset.path)
    groups = split_groups(dataset, ALL_ROWS)
    probed = groups[:: max(1, len(groups) // NUM_PROBED_GROUPS)][:NUM_PROBED_GROUPS]
    reader = RowGroupReader(dataset, schema)
    taken: dict[str, list[Taken]] = {stage: [] for stage in STAGES}
    for done, group in enumerate([probed[0], *probed]):  # the first one twice: it opens files and fills caches
        progress("time stages", done, len(probed) + 1)
        clock = Clock()
        raw = reader.read(group)
        laps = {"read": clock.lap()}
        table = reader.decode(group, raw)
        laps["decode"] = clock.lap()
        block = reader.transform(group, table)
        laps["transform"] = clock.lap()
        for start in range(0, len(block), batch_size):
            rows = (block, start, min(len(block), start + batch_size))
            assemble_batch([rows], schema, num_global=batch_size)
        laps["batch"] = clock.lap()
        if done:
            for stage, lap in laps.items():
                taken[stage].append(lap)
    progress("time stages", len(probed) + 1, len(probed) + 1)
    reader.close()
    num_rows = statistics.median(group.num_rows for group in probed)
    return {
        stage: StageTime(
            seconds=statistics.median(entry.service_seconds for entry in entries),
            cpu_seconds=statistics.median(entry.cpu_seconds for entry in entries),
            rows=num_rows,
        )
        for stage, entries in taken.items()
    }


def measure_throughput(
    dataset: Dataset,
    *,
    workers: Mapping[str, int],
    batch_size: int,
    measure_s: float,
    warm_up_s: float = WARM_UP_S,
    **options: Any,
) -> Throughput:
    """Rows per second over `measure_s`, after a short warm-up; small data is read repeatedly.

    All lanes reach new row groups in the same batch, so batches arrive in bursts, one per round. Whole rounds are
    measured if they are not too long: 0.08 s out of rounds of 0.12 s would be meaningless.
    """
    with IngestPipeline(
        dataset,
        split=ALL_ROWS,
        batch_size=batch_size,
        epochs=MAX_EPOCHS,
        workers=workers,
        **options,
    ) as pipeline:
        round_batches = _batches_per_round(pipeline, batch_size)
        started, num_rows, is_warm, cpu_before_s = time.perf_counter(), 0, False, 0.0
        for number, batch in enumerate(pipeline):
            num_rows += len(batch)
            over_s = time.perf_counter() - started - (measure_s if is_warm else warm_up_s)
            if over_s < 0 or (number % round_batches and over_s < MAX_LONGER_S):
                continue
            if is_warm:
                break
            cpu_before_s = _cpu_seconds(pipeline.stats())
            started, num_rows, is_warm = time.perf_counter(), 0, True
        seconds = time.perf_counter() - started
        stats = pipeline.stats()
    return Throughput(
        stages=dict(workers),
        rows_per_s=num_rows / seconds,
        memory_bytes=stats["memory"]["peak_bytes"],
        num_rows=num_rows,
        seconds=seconds,
        cpu_seconds=_cpu_seconds(stats) - cpu_before_s,
    )


def _batches_per_round(pipeline: IngestPipeline, batch_size: int) -> int:
    """The number of batches after which every lane has reached its next row group."""
    rows = statistics.median(group.num_rows for group in split_groups(pipeline.dataset, ALL_ROWS))
    return max(1, min(pipeline.batches_per_epoch, round(pipeline.num_lanes * rows / batch_size)))


def _cpu_seconds(stats: Mapping[str, Any]) -> float:
    """CPU seconds of all stages since the iteration began."""
    return sum(float(stats[stage]["cpu_seconds"]) for stage in STAGES)
