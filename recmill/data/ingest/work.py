"""How the work of a stage on one row group is done: in the worker's thread, or in a process if the GIL is in the way.

Arrow, NumPy and our kernels release the GIL, so threads are the rule. A reader of the user's own may not: when a stage
has two workers or more, one item is done again by two threads at once, and if they wait for each other the stage moves
to processes. The functions of a stage are pure, so that changes no result.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from recmill.data.ingest.clock import Clock, Taken
from recmill.data.ingest.splits import RowGroup
from recmill.data.ingest.stages import PlainReader
from recmill.data.ingest.transport import Parcel, pack, shared_folder, unpack

PURE_STAGES = ("decode", "transform")  # reading waits for devices, and cutting batches shares blocks
MIN_PROBED_S = 0.002  # what takes less is not worth a process
BLOCKED_SHARE = 0.3  # two threads that exclude each other are blocked half of the time


class RowGroupWork:
    """Does the stages "read", "decode" and "transform"."""

    def __init__(self, reader: PlainReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._is_probed = dict.fromkeys(PURE_STAGES, False)
        self._pool: ProcessPoolExecutor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.in_processes: set[str] = set()

    def do(self, stage: str, group: RowGroup, payload: Any, *, workers: int) -> tuple[Any, Taken]:
        """The result of a stage and what it took this thread, or the process that did it."""
        if stage in self.in_processes:
            return self._do_in_process(stage, group, payload)
        clock = Clock()
        result = perform(self._reader, stage, group, payload)
        taken = clock.lap()
        if workers > 1 and stage in PURE_STAGES and not self._is_probed[stage]:
            self._consider(stage, group, payload, taken)
        return result, taken

    def _consider(self, stage: str, group: RowGroup, payload: Any, alone: Taken) -> None:
        with self._lock:
            if self._is_probed[stage] or alone.cpu_seconds < MIN_PROBED_S:
                return
            self._is_probed[stage] = True
        if is_gil_bound(lambda: perform(self._reader, stage, group, payload), alone=alone):
            self._move(stage)

    def _move(self, stage: str) -> None:
        with self._lock:
            if self._pool is None:
                self._folder = shared_folder()
                self._pool = ProcessPoolExecutor(
                    max_workers=len(os.sched_getaffinity(0)),
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_begin,
                    initargs=(self._reader, self._folder.name),
                )
            self.in_processes.add(stage)

    def _do_in_process(self, stage: str, group: RowGroup, payload: Any) -> tuple[Any, Taken]:
        pool, folder = self._pool, self._folder
        assert pool is not None
        assert folder is not None
        parcel, taken = pool.submit(_perform_parcel, stage, group, pack(payload, folder.name)).result()
        return unpack(parcel), taken

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()


def perform(reader: PlainReader, stage: str, group: RowGroup, payload: Any) -> Any:
    """The result of a stage, in this thread."""
    if stage == "read":
        return reader.read(group)
    return reader.decode(group, payload) if stage == "decode" else reader.transform(group, payload)


def is_gil_bound(work: Callable[[], object], *, alone: Taken) -> bool:
    """Whether two threads that do the same work wait for each other, not counting what one alone waits for.

    Waiting for a core is left out, so that a busy machine does not look like a busy lock.
    """
    taken: list[Taken] = []

    def run() -> None:
        clock = Clock()
        work()
        taken.append(clock.lap())

    helper = threading.Thread(target=run, name="ingest-probe", daemon=True)
    helper.start()
    run()
    helper.join()
    return len(taken) == 2 and _blocked_share(*taken) - _blocked_share(alone) > BLOCKED_SHARE


def _blocked_share(*taken: Taken) -> float:
    blocked = sum(entry.blocked_seconds for entry in taken)
    return blocked / max(1e-9, blocked + sum(entry.cpu_seconds for entry in taken))


_reader: PlainReader
_folder_name: str


def _begin(reader: PlainReader, folder_name: str) -> None:
    """What a new process keeps for the calls to come."""
    global _reader, _folder_name
    _reader, _folder_name = reader, folder_name


def _perform_parcel(stage: str, group: RowGroup, parcel: Parcel) -> tuple[Parcel, Taken]:
    clock = Clock()
    result = perform(_reader, stage, group, unpack(parcel))
    return pack(result, _folder_name), clock.lap()
