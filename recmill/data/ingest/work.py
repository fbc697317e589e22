"""How the work of a stage on one row group is done: in the worker's thread, or in a process if the GIL is in the way.

Arrow, NumPy and our kernels release the GIL, so threads are the rule. A reader of the user's own may not: when a stage
has two workers or more, an item is done again by two threads at once, and if they wait for each other, twice, the stage
moves to processes as soon as those are up. A busy machine can hide that, so the question is asked again, ever more
rarely. That is two items more each time, ten in the first 32, so stages of our own are asked only when one of their
workers was seen to wait. The functions of a stage are pure, so that changes no result.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from recmill.data.ingest.clock import Clock, Taken
from recmill.data.ingest.splits import RowGroup
from recmill.data.ingest.stages import PlainReader
from recmill.data.ingest.transport import Parcel, pack, shared_folder, unpack

PURE_STAGES = ("decode", "transform")  # reading waits for devices, and cutting batches shares blocks
MIN_PROBED_S = 0.005  # what takes less is not worth a process
NUM_PROBES = 2
BLOCKED_SHARE = 0.3  # two threads that exclude each other are blocked half of the time


@dataclass(kw_only=True)
class _Probes:
    """When a stage is probed: at the next item while it looks bound, else after twice as many items as last time."""

    num_bound: int = 0  # probes in a row that found it so
    wait: int = 1
    num_left: int = 1
    is_settled: bool = False

    def is_due(self) -> bool:
        """Count an item."""
        self.num_left -= 1
        return not self.is_settled and self.num_left <= 0

    def note(self, is_bound: bool) -> bool:
        """Whether this probe settles that the stage moves."""
        self.num_bound = self.num_bound + 1 if is_bound else 0
        if not is_bound:
            self.wait *= 2
        self.num_left = 1 if is_bound else self.wait
        self.is_settled = self.num_bound == NUM_PROBES
        return self.is_settled


class RowGroupWork:
    """Does the stages "read", "decode" and "transform"."""

    def __init__(self, reader: PlainReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._probes = {stage: _Probes() for stage in PURE_STAGES}
        self._pool: ProcessPoolExecutor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_closed = False
        self.in_processes: set[str] = set()

    def do(self, stage: str, group: RowGroup, payload: Any, *, workers: int) -> tuple[Any, Taken]:
        """The result of a stage and what it took this thread, or the process that did it."""
        if stage in self.in_processes:
            return self._do_in_process(stage, group, payload)
        clock = Clock()
        result = perform(self._reader, stage, group, payload)
        taken = clock.lap()
        if workers > 1 and stage in PURE_STAGES and self._is_suspect(stage, taken):
            self._consider(stage, group, payload, taken)
        return result, taken

    def _is_suspect(self, stage: str, taken: Taken) -> bool:
        """Whether it may be the GIL that keeps workers of the stage from each other, and would pay to know."""
        if taken.cpu_seconds < MIN_PROBED_S:
            return False
        return not is_own_stage(self._reader, stage) or _blocked_share(taken) > BLOCKED_SHARE

    def _consider(self, stage: str, group: RowGroup, payload: Any, alone: Taken) -> None:
        """Probe if it is time to, unless another worker does; NUM_PROBES that agree settle the matter."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            probes = self._probes[stage]
            if not probes.is_due():
                return
            if probes.note(is_gil_bound(lambda: perform(self._reader, stage, group, payload), alone=alone)):
                self._move(stage)
        finally:
            self._lock.release()

    def _move(self, stage: str) -> None:
        """Start the processes; the stage goes on in threads until the first one answers."""
        if self._is_closed:
            return
        if self._pool is None:
            self._folder = shared_folder()
            self._pool = ProcessPoolExecutor(
                max_workers=len(os.sched_getaffinity(0)),
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self._reader, self._folder.name),
            )

        def note(answer: Future[bool]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self.in_processes.add(stage)

        self._pool.submit(_is_up).add_done_callback(note)

    def _do_in_process(self, stage: str, group: RowGroup, payload: Any) -> tuple[Any, Taken]:
        pool, folder = self._pool, self._folder
        assert pool is not None
        assert folder is not None
        parcel, taken = pool.submit(_perform_parcel, stage, group, pack(payload, folder.name)).result()
        return unpack(parcel), taken

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            # Some may still be importing: nobody waits for what they would do.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()


def perform(reader: PlainReader, stage: str, group: RowGroup, payload: Any) -> Any:
    """The result of a stage, in this thread."""
    if stage == "read":
        return reader.read(group)
    return reader.decode(group, payload) if stage == "decode" else reader.transform(group, payload)


def is_own_stage(reader: PlainReader, stage: str) -> bool:
    """Whether this package wrote what the stage does."""
    return bool(getattr(type(reader), stage).__module__ == PlainReader.__module__)


def never_waits(reader: PlainReader, stage: str) -> bool:
    """Whether the stage is of this package and does nothing but compute, as all but reading do."""
    return stage != "read" and is_own_stage(reader, "assemble" if stage == "batch" else stage)


def is_gil_bound(work: Callable[[], object], *, alone: Taken) -> bool:
    """Whether two threads that do the same work wait for each other, not counting what one alone waits for.

    Waiting for a core is left out, so that a busy machine does not look like a busy lock. Where the machine itself is a
    guest, its host takes cores away unseen; but a thread that waits for the GIL looks up every switch interval, and
    those sleeps are counted.
    """
    taken: list[Taken] = []
    num_sleeps: list[int] = []

    def run() -> None:
        sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        clock = Clock()
        work()
        taken.append(clock.lap())
        num_sleeps.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - sleeps)

    helper = threading.Thread(target=run, name="ingest-probe", daemon=True)
    helper.start()
    run()
    helper.join()
    blocked_s = sum(entry.blocked_seconds for entry in taken)
    has_slept = sum(num_sleeps) >= 0.5 * blocked_s / sys.getswitchinterval()
    return len(taken) == 2 and has_slept and _blocked_share(*taken) - _blocked_share(alone) > BLOCKED_SHARE


def _blocked_share(*taken: Taken) -> float:
    blocked = sum(entry.blocked_seconds for entry in taken)
    return blocked / max(1e-9, blocked + sum(entry.cpu_seconds for entry in taken))


_reader: PlainReader
_folder_name: str


def _begin(reader: PlainReader, folder_name: str) -> None:
    """What a new process keeps for the calls to come."""
    global _reader, _folder_name
    _reader, _folder_name = reader, folder_name


def _is_up() -> bool:
    return True


def _perform_parcel(stage: str, group: RowGroup, parcel: Parcel) -> tuple[Parcel, Taken]:
    clock = Clock()
    result = perform(_reader, stage, group, unpack(parcel))
    return pack(result, _folder_name), clock.lap()
