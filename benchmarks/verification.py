"""What it costs to compare what is read with its checksums: CPU seconds of the checks, as a share of a training epoch.

    RECMILL_DATA_DIR=data python benchmarks/verification.py [--quick] [--json PATH|-] [--seed K]

One rank trains an epoch of globo in this process. Counted as checks: loading the dataset, which hashes its small files,
with everything else that it does; every footer that is read and hashed; the checksum of every page of every row group.
The epoch is training alone, without evaluation and checkpoints. CPU time, so other work on the machine does not matter
much. Also given: hashing the whole dataset once, which --verify full adds.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import Metric, finish, parse_options, plain_value, say
from session_logs import why_no_globo
from training_rate import one_rank

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.sources.raw_log import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.rank.worker import open_run
from recmill.training.trainer import make_job

ONE_IN = {"tiny": 512, "quick": 64, "full": 8}  # users
REPEATS = {"tiny": 1, "quick": 3, "full": 5}
# Where checks are called, by the names that their callers know them by.
CHECKS = (
    "kernels.decode_pages.find_damaged_chunk",
    "kernels.decode_pages.raise_if_damaged",
    "recmill.data.ingest.parts.read_footer",
)


class Clock:
    """CPU seconds of calls, over all threads."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._lock = 0.0, 0, threading.Lock()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                with self._lock:
                    self.seconds, self.calls = self.seconds + time.thread_time() - began, self.calls + 1

        return call


@contextmanager
def timed_checks() -> Iterator[Clock]:
    import importlib

    clock = Clock()
    with ExitStack() as stack:
        for name in CHECKS:
            module, function = name.rsplit(".", 1)
            found = getattr(importlib.import_module(module), function)
            stack.enter_context(mock.patch(name, clock.timed(found)))
        yield clock


def train_epoch(data: str, out: Path, seed: int) -> tuple[float, float, int]:
    """(CPU seconds of the checks, of the epoch, number of checks)"""
    config = TrainConfig(epochs=1, checkpoint_every=10**9, tuning="false", hot_batches="false", trial=False, seed=seed)
    out.mkdir()
    with timed_checks() as clock:
        load = clock.timed(lambda: Dataset.load(data))
        load()
        job = make_job(data, out=out, plan=None, allocation=None, nproc=1, config=config)
        run = open_run(job, torch.device("cpu"), report=lambda *_: None)
        finish_run, counted = run._finish, {}

        def at_the_end(*arguments: Any) -> dict[str, Any]:  # the evaluation that follows is not part of the epoch
            counted.update(seconds=clock.seconds, calls=clock.calls)
            return finish_run(*arguments)

        run._finish = at_the_end  # type: ignore[method-assign]
        result = run.train()
        run.sharded.close()
    return counted["seconds"], result["usage"]["cpu_seconds"], counted["calls"]


def measure(folder: Path, size: str, seed: int) -> dict[str, Metric]:
    make_raw_log("globo", out=folder / "raw", overrides={"seed": seed, "one_in": ONE_IN[size]})
    data = cluster_sessions(folder / "raw", out=folder / "data", layout="deduplicated", eval_fraction=0.1)
    shares: list[float] = []
    whole: list[float] = []
    with one_rank():
        for repeat in range(REPEATS[size]):
            checks, epoch, calls = train_epoch(data.path, folder / f"run-{repeat}", seed)
            began = time.process_time()
            Dataset.load(data.path, verify=True)
            whole.append((time.process_time() - began) / epoch)
            shares.append(checks / epoch)
            say(f"{calls:,} checks: {checks:.4f} of {epoch:.2f} CPU seconds, {shares[-1]:.3%}; all: {whole[-1]:.3%}")
    note = f"one in {ONE_IN[size]} users of globo, default model, 1 process, {data.num_rows:,} rows"
    return {
        "verification_share": plain_value(shares, unit="of an epoch's CPU time", note=note),
        "verification_full_share": plain_value(whole, unit="of an epoch's CPU time", note=f"--verify full; {note}"),
    }


def main() -> None:
    options = parse_options(__doc__, quick="an eighth of the users, 3 epochs instead of 5")
    if reason := why_no_globo():
        finish(options, {}, skipped=dict.fromkeys(("verification_share", "verification_full_share"), reason))
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as scratch:
        finish(options, measure(Path(scratch), options.size, options.seed))


if __name__ == "__main__":
    main()
