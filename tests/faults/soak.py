"""Hours of training under changing limits: python -m tests.faults.soak --minutes 120 [--seed N] [--json PATH]

One rank trains epoch after epoch with online tuning, while CPU quota, memory limit, cores of the tuner and workers of
the stages change at random. At the end: every epoch read every row exactly once, by hashes over all ids, dense values
and labels; memory did not grow; and training never stood still.

Memory is the resident set, as users see it. Beside it stand its parts: what is allocated (C library, Arrow, Python's
objects), which a leak makes grow, and the rest, which allocators keep for later: one heap per thread, so that more
workers than ever before make it grow once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.distributed as dist

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline
from recmill.data.sources.raw_log import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.processes import frozen_objects, keep_freed_memory
from recmill.training.rank.worker import open_run
from recmill.training.trainer import make_job

WARM_UP_MINUTES = 10  # or a third of the time
STILL_S = 180  # without a step: a deadlock. Seconds in which this process ran: it may wait for a core for long
PRINT_S = 300
MAX_GROWTH = 0.05
CPU_GROUPS, MEMORY_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory")  # version 1
GROUPS = Path("/sys/fs/cgroup")  # version 2
PERIOD_US = 100_000


def hash_rows(batch: Batch) -> np.ndarray:
    """A 64-bit hash of everything in each row."""
    ids = batch.ids.to_kjt() if hasattr(batch.ids, "to_kjt") else batch.ids
    num_rows, keys = len(batch), ids.keys()
    lengths = ids.lengths().numpy().astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    list_of_value = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(list_of_value)) - offsets[list_of_value]
    with np.errstate(over="ignore"):
        mixed = _mix(ids.values().numpy().astype(np.uint64) + _mix(position.astype(np.uint64) + np.uint64(1)))
        mixed = _mix(mixed + _mix((list_of_value // num_rows).astype(np.uint64)))  # by feature
        row_B = np.zeros(num_rows, np.uint64)
        np.add.at(row_B, list_of_value % num_rows, mixed)
        np.add.at(row_B, np.tile(np.arange(num_rows), len(keys)), _mix(lengths.astype(np.uint64)))
        for column, values in enumerate([*batch.dense_BF.numpy().T, *batch.label_BT.numpy().T]):
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
            row_B += _mix(bits + _mix(np.uint64([column])))
        return _mix(row_B)


def _mix(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = values * np.uint64(0x9E3779B97F4A7C15)
        values ^= values >> np.uint64(29)
        values = values * np.uint64(0xBF58476D1CE4E5B9)
        return values ^ values >> np.uint64(32)


@dataclass
class RowSum:
    """A hash over a set of rows in any order: two sets with the same number, sum and exclusive or are equal."""

    num_rows: int = 0
    total: int = 0
    parity: int = 0

    def add(self, batch: Batch) -> None:
        rows = hash_rows(batch)
        self.num_rows += len(rows)
        self.total = (self.total + int(rows.sum(dtype=np.uint64))) % 2**64
        self.parity ^= int(np.bitwise_xor.reduce(rows)) if len(rows) else 0


class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped_bytes", *"ef", "used_bytes", "free_bytes", "g")]


def memory_parts() -> dict[str, int]:
    """Bytes of this process: resident, without mapped files, allocated by the C library and by Arrow, and objects."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    allocated, own = mallinfo(), psutil.Process().memory_info()
    return {
        "resident": own.rss,
        "anonymous": own.rss - own.shared,
        "malloc_used": allocated.used_bytes + allocated.mapped_bytes,
        "malloc_kept": allocated.free_bytes,
        "arrow_used": pa.total_allocated_bytes(),
        "objects": len(gc.get_objects()),
    }


@dataclass
class Watch:
    """What happened: row hashes by epoch, memory over time, the longest time without a step."""

    batches_per_epoch: int = 1
    epochs: list[RowSum] = field(default_factory=list)
    steps: int = 0
    last_step: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    times_s: array[float] = field(default_factory=lambda: array("d"))  # arrays: what is watched has no objects of ours
    resident: array[int] = field(default_factory=lambda: array("q"))
    parts: list[dict[str, int]] = field(default_factory=list)  # every five minutes
    changes: list[str] = field(default_factory=list)

    def see(self, batch: Batch) -> None:
        if self.steps % self.batches_per_epoch == 0:
            self.epochs.append(RowSum())
        self.epochs[-1].add(batch)
        now = time.monotonic()
        if self.steps:
            self.longest_s = max(self.longest_s, now - self.last_step)
        self.steps, self.last_step = self.steps + 1, now

    def follow(self, stopped: threading.Event) -> None:
        """Sample memory every second; end the process with all stacks if training stands still."""
        own, started, printed, seen, still = psutil.Process(), time.monotonic(), 0.0, 0, 0
        while not stopped.wait(1.0):
            elapsed = time.monotonic() - started
            self.times_s.append(elapsed)
            self.resident.append(own.memory_info().rss)
            seen, still = self.steps, (still + 1 if self.steps == seen else 0)
            if elapsed >= printed:
                printed += PRINT_S
                self.parts.append({"minute": round(elapsed / 60), "steps": self.steps, **memory_parts()})
                print(json.dumps(self.parts[-1]), flush=True)
            if still > STILL_S:
                print(f"no step for {STILL_S} s", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(3)

    def growth(self, minutes: float) -> float:
        """Median memory of the last fifth of the time, over that of the fifth after the warm-up, minus 1."""
        start = min(WARM_UP_MINUTES, minutes / 3) * 60
        later = [rss for at, rss in zip(self.times_s, self.resident, strict=True) if at >= start]
        fifth = max(1, len(later) // 5)
        return statistics.median(later[-fifth:]) / statistics.median(later[:fifth]) - 1


class Limits:
    """CPU quota and memory limit of this process: control groups where they can be written, else only its cores."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        name = f"recmill-soak-{os.getpid()}"
        is_old = (CPU_GROUPS / "cpu.cfs_quota_us").parent.exists() and CPU_GROUPS.is_dir()
        roots = [CPU_GROUPS, MEMORY_GROUPS] if is_old else [GROUPS]
        self.groups = [root / name for root in roots if os.access(root, os.W_OK) and os.getuid() == 0]
        for group in self.groups:
            group.mkdir()
            if os.sched_getscheduler(0) == os.SCHED_IDLE and (group / "cpu.idle").exists():
                (group / "cpu.idle").write_text("1")  # or the group competes as any other process
            (group / "cgroup.procs").write_text(str(os.getpid()))
            stack.callback(self._leave, group)
        self.kind = "control groups" if self.groups else "cores of the process only"

    @staticmethod
    def _leave(group: Path) -> None:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()

    def set_cpu(self, cores: float) -> None:
        if not self.groups:
            os.sched_setaffinity(0, range(max(1, round(cores))))
            return
        old = self.groups[0] / "cpu.cfs_quota_us"
        if old.exists():
            old.write_text(str(int(cores * PERIOD_US)))
        else:
            (self.groups[0] / "cpu.max").write_text(f"{int(cores * PERIOD_US)} {PERIOD_US}")

    def set_memory(self, num_bytes: int) -> None:
        for group in self.groups:
            for name in ("memory.limit_in_bytes", "memory.max"):
                if (group / name).exists():
                    with contextlib.suppress(OSError):  # more is in use than that
                        (group / name).write_text(str(num_bytes))


def change_things(run: Any, limits: Limits, watch: Watch, seed: int, stopped: threading.Event) -> None:
    """Another limit or allocation every few seconds."""
    draw, cores = random.Random(seed), os.cpu_count() or 1
    while not stopped.wait(draw.uniform(1, 6)):
        pipeline, used = run.ingest.pipelines[0], psutil.Process().memory_info().rss
        kind = draw.choice(["cpu", "cpu", "memory", "workers", "ingestion memory"])
        if kind == "cpu":
            limits.set_cpu(value := round(draw.uniform(0.3, cores), 2))
        elif kind == "memory":
            limits.set_memory(value := int(used * draw.uniform(1.3, 3)) + 2**28)
        elif kind == "workers":
            stages = ("read", "decode", "transform", "batch")
            pipeline.set_workers(value := {stage: draw.randint(1, 4) for stage in stages})
        else:
            pipeline.set_memory_limit(value := draw.randint(64, 512) * 2**20)
        watch.changes.append(f"{kind} {value}")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The process group of a run on one rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def soak(work: Path, *, minutes: float, seed: int, sessions: int = 2000) -> dict[str, Any]:
    make_raw_log("tiny", out=work / "raw", overrides={"sessions": sessions, "seed": seed})
    data = cluster_sessions(work / "raw", out=work / "data", layout="deduplicated", eval_fraction=0.1).path
    config = TrainConfig(
        batch_size=256,
        epochs=1_000_000,
        checkpoint_every=200,
        tuning="true",
        hot_batches="false",
        eval_every=5_000,
        threads=1,
        trial=False,
    )
    expected = RowSum()
    with IngestPipeline(Dataset.load(data), batch_size=256, shuffle=False) as batches:
        for batch in batches:
            expected.add(batch)
    watch, stopped = Watch(), threading.Event()
    (work / "run").mkdir()
    job = make_job(data, out=work / "run", plan=None, allocation=None, nproc=1, config=config)
    with contextlib.ExitStack() as stack:
        limits = Limits(stack)
        stack.enter_context(alone())
        torch.set_num_threads(1)
        run = open_run(job, torch.device("cpu"), report=lambda *_: None)
        watch.batches_per_epoch = run.ingest.batches_per_epoch
        step = run.train_step

        def watched_step(batch: Batch, is_hot: bool) -> None:
            watch.see(batch)
            step(batch, is_hot)
            if time.monotonic() > deadline:
                run.state.is_stopped = True

        run.train_step = watched_step  # type: ignore[method-assign]
        deadline = time.monotonic() + 60 * minutes
        threads = [
            threading.Thread(target=watch.follow, args=(stopped,), daemon=True),
            threading.Thread(target=change_things, args=(run, limits, watch, seed, stopped), daemon=True),
        ]
        for thread in threads:
            thread.start()
        with frozen_objects():
            result = run.train()
        stopped.set()
        for thread in threads:
            thread.join()
    whole = watch.epochs[: watch.steps // watch.batches_per_epoch]
    return {
        "minutes": minutes,
        "seed": seed,
        "limits": limits.kind,
        "changes": len(watch.changes),
        "decisions_of_tuner": len(result["tuning"]),
        "steps": watch.steps,
        "whole_epochs": len(whole),
        "wrong_epochs": sum(epoch != expected for epoch in whole),
        "rows_per_epoch": expected.num_rows,
        "checkpoints": result["saving"]["num_saves"],
        "longest_step_s": round(watch.longest_s, 2),
        "cpu_seconds": round(time.process_time()),
        "memory_growth": round(watch.growth(minutes), 4),
        "memory_mib": [round(rss / 2**20) for rss in watch.resident[:: max(1, len(watch.resident) // 20)]],
        "memory_parts": watch.parts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="build/soak.json")
    options = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="recmill-soak-") as folder:
        found = soak(Path(folder), minutes=options.minutes, seed=options.seed)
    is_green = found["wrong_epochs"] == 0 and found["whole_epochs"] > 0 and found["memory_growth"] <= MAX_GROWTH
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps({**found, "is_green": is_green}, indent=1))
    print("\n".join(f"{name:20}{value}" for name, value in found.items()))
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
