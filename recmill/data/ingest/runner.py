"""Worker threads that turn a schedule of row groups into batches, in order, within a budget of bytes.

    schedule --admit--> read --> decode --> transform --> [reorder] --> batch --> [reorder] --> consumer
               |                                                          |                        |
               +--<-- bytes of row groups that no batch needs any more ---+      +--<-- a free slot+

Row groups are admitted in the order in which batches need them, and memory is charged at admission. The oldest row
group therefore always holds its share already, and a full budget cannot block the batch that would free it. A stage
works on at most as many items at once as it has workers, and all stages together on no more than keep all cores busy,
so setting too many workers does no harm.
"""

from __future__ import annotations

import heapq
import math
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from recmill.artifacts import InputError
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest.crew import WAKE_S, Crew
from recmill.data.ingest.memory import Budget, MemoryGuard
from recmill.data.ingest.reader import NEXT_STAGE, STAGES, RowGroupReader
from recmill.data.ingest.schedule import Entry, Schedule
from recmill.data.ingest.statistics import ActiveItems, Clock, MemoryCounter, StageCounter
from recmill.data.ingest.tasks import Assembly, Job, Result, Task


class StageRunner:
    """Runs the stages of one iteration. Thread-safe; `next_batch` is for one consumer."""

    def __init__(
        self,
        reader: RowGroupReader,
        schedule: Schedule,
        *,
        workers: Mapping[str, int],
        prefetch: int,
        budget: Budget,
        guard: MemoryGuard,
        delays_s: Mapping[str, float],
    ) -> None:
        self._reader, self._schedule, self._guard, self._delays_s = reader, schedule, guard, delays_s
        self._prefetch, self._limit_bytes = prefetch, budget.limit_bytes
        # Re-entrant: a garbage collection under the lock may finalise the pipeline, which calls request_stop.
        self._lock = threading.RLock()
        # Wakes the consumer. Not a condition of the lock: the thread that woke it would still hold that.
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_awaited = False  # the batch that the consumer waits for has arrived and it was not told yet
        self._cores = len(os.sched_getaffinity(0))
        # Only reading and delayed stages wait for something other than a core; how much is measured as they run.
        self._counters = {
            stage: StageCounter(workers=workers[stage], core_share=float(stage != "read" and not delays_s.get(stage)))
            for stage in STAGES
        }
        self._active = ActiveItems(self._counters, cores=self._cores)
        self._memory = MemoryCounter()
        self._queues: dict[str, list[tuple[int, Job]]] = {"decode": [], "transform": []}
        self._num_admitted = self._num_ready = 0  # row groups admitted; transformed without a gap
        self._num_unsettled = 0  # row groups between admission and the end of their transformation
        self._is_batch_waiting = False  # for bytes
        self._entry: Entry | None = None  # the next to admit, once it was looked up
        self._needed: tuple[int, int] = (-1, 0)  # a batch, and how many row groups it needs
        self._ready: dict[int, Job] = {}  # transformed row groups by sequence number
        self._retire: list[tuple[int, int]] = []  # heap of (last batch that needs it, sequence number)
        self._expansion = 1.0  # bytes of the widest row group so far over what its footer promised
        self._next_cut = self._num_cut = self._next_out = schedule.batches.start
        self._done_cuts: set[int] = set()  # finished batches beyond `_num_cut`
        self._outputs: dict[int, tuple[Batch, int]] = {}
        self._num_open = 0  # batches that are being assembled or wait for the consumer
        self._error: BaseException | None = None
        self._is_stopped = False
        self._started = time.perf_counter()
        self._stall_s = 0.0
        self._stalled_since: float | None = None
        self._rows_out = 0
        self._crew: Crew[Task, Result] = Crew(
            self._lock,
            take=self._take,
            has_task=self._has_task,
            perform=self._perform,
            finish=self._finish,
            is_over=self._is_over,
        )
        self._crew.resize(self._num_workers())

    def set_workers(self, workers: Mapping[str, int]) -> None:
        with self._lock:
            for stage, count in workers.items():
                self._counters[stage].resize(count)
            self._crew.resize(self._num_workers())

    def set_budget(self, budget: Budget) -> None:
        with self._lock:
            self._limit_bytes = budget.limit_bytes
            self._schedule.set_budget(budget)
            self._crew.wake()

    def request_stop(self) -> None:
        """Tell the workers to stop after the current item. Safe to call from anywhere, including a finaliser."""
        self._is_stopped = True
        self._arrived.put(None)
        if self._lock.acquire(blocking=False):
            try:
                self._crew.wake_all()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Stop all workers and wait until they have exited."""
        with self._lock:
            self.request_stop()
        self._crew.join()
        with self._lock:
            self._ready.clear()
            self._outputs.clear()
            for waiting in self._queues.values():
                waiting.clear()

    def next_batch(self) -> Batch | None:
        """The next batch, or None after the last; raises what a worker raised."""
        while True:
            with self._lock:
                if self._next_out >= self._schedule.batches.stop:
                    return None
                if self._next_out in self._outputs or self._is_over():
                    return self._deliver()
                self._stalled_since = self._stalled_since or time.perf_counter()
            with suppress(queue.Empty):
                self._arrived.get(timeout=WAKE_S)

    def _deliver(self) -> Batch:
        if self._stalled_since is not None:
            self._stall_s += time.perf_counter() - self._stalled_since
            self._stalled_since = None
        if self._error is not None:
            raise self._error
        if self._is_stopped:
            raise RuntimeError("the ingest pipeline was closed while it was read")
        batch, num_bytes = self._outputs.pop(self._next_out)
        self._next_out += 1
        self._num_open -= 1
        self._rows_out += len(batch)
        self._memory.add(batches=-num_bytes)
        self._crew.wake()
        return batch

    def stats(self) -> dict[str, Any]:
        with self._lock:
            now = time.perf_counter()
            elapsed_s = now - self._started
            waits_s = 0.0 if self._stalled_since is None else now - self._stalled_since
            lengths = {
                "read": 0,
                "decode": len(self._queues["decode"]),
                "transform": len(self._queues["transform"]),
                "batch": self._num_ready - min(self._num_ready, self._num_needed()),
            }
            summaries: dict[str, Any] = {
                stage: counter.summary(elapsed_s=elapsed_s, queue=lengths[stage], queue_size=self._read_ahead())
                for stage, counter in self._counters.items()
            }
            summaries["consumer"] = {
                "batches": self._next_out - self._schedule.batches.start,
                "rows": self._rows_out,
                "rows_per_s": self._rows_out / elapsed_s if elapsed_s else 0.0,
                "seconds": elapsed_s,
                "stall_seconds": self._stall_s + waits_s,
                "queue": len(self._outputs),
                "queue_fill": len(self._outputs) / self._prefetch,
            }
            summaries["memory"] = {
                "bytes": self._memory.total,
                "peak_bytes": self._memory.peak,
                "limit_bytes": self._limit_bytes,
                "expansion": self._expansion,
                "pauses": self._guard.num_pauses,
            }
            return summaries

    def _num_workers(self) -> int:
        return sum(counter.workers for counter in self._counters.values())

    def _is_over(self) -> bool:
        return self._is_stopped or self._error is not None

    def _tell_consumer(self) -> None:
        """Wake the consumer if its batch has arrived: best without the lock, which it needs next."""
        if self._is_awaited:
            self._is_awaited = False
            self._arrived.put(None)

    def _take(self) -> Task | None:
        """A task, from the stage nearest to the consumer that has one."""
        for stage in reversed(STAGES):
            if self._active.has_room(stage):
                try:
                    task = self._take_from(stage)
                except InputError as error:
                    self._fail(stage, None, error)
                    return None
                if task is not None:
                    self._active.add(stage, 1)
                    return stage, task
        self._tell_consumer()
        return None

    def _take_from(self, stage: str) -> Job | Assembly | None:
        if stage == "batch":
            return self._take_cut()
        if stage == "read":
            return self._admit()
        waiting = self._queues[stage]
        return heapq.heappop(waiting)[1] if waiting else None

    def _has_task(self) -> bool:
        """Whether `_take` would find a task or fail. Occasionally wrong: then `_take` finds nothing."""
        if any(waiting and self._active.has_room(stage) for stage, waiting in self._queues.items()):
            return True
        try:
            return (self._active.has_room("batch") and self._can_cut()) or (
                self._active.has_room("read") and self._can_admit()
            )
        except InputError:
            return True

    def _fail(self, stage: str, task: Job | Assembly | None, error: BaseException) -> None:
        if isinstance(task, Job) and not isinstance(error, InputError):
            error.add_note(f"in stage {stage!r} of {self._reader.describe(task.entry.group)}")
        with self._lock:
            self._error = self._error or error
            self._crew.wake_all()
            self._arrived.put(None)

    def _perform(self, task: Task) -> Result:
        self._tell_consumer()
        stage, item = task
        try:
            return self._perform_stage(stage, item)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            return Result(error=error)

    def _finish(self, task: Task, result: Result) -> Task | None:
        """Account for the task; returns the next stage of the same row group if that has room."""
        stage, item = task
        if result.taken is None:
            assert result.error is not None
            self._fail(stage, item, result.error)
            return None
        self._counters[stage].add(rows=result.rows, num_bytes=result.num_bytes, taken=result.taken)
        self._active.add(stage, -1)
        if isinstance(item, Assembly):
            self._finish_cut(item, result.value, result.num_bytes)
            return None
        item.payload = result.value
        if stage not in NEXT_STAGE:
            self._settle(item)
            return None
        following = self._pass_on(NEXT_STAGE[stage], item)
        self._crew.wake()
        return following

    def _perform_stage(self, stage: str, item: Job | Assembly) -> Result:
        clock = Clock()
        if self._delays_s.get(stage):
            time.sleep(self._delays_s[stage])
        if isinstance(item, Assembly):
            batch = self._reader.assemble(item.slices, num_global=item.cut.num_global)
            num_bytes = min(item.num_bytes, batch.size_in_bytes())
            return Result(value=batch, rows=len(batch), num_bytes=num_bytes, taken=clock.lap())
        group = item.entry.group
        value = self._reader.perform(stage, group, item.payload)
        return Result(value=value, rows=group.num_rows, num_bytes=value.nbytes, taken=clock.lap())

    def _read_ahead(self) -> int:
        """How many row groups beyond those the next batch needs may be in progress."""
        num_ahead = 0
        for stage, counter in self._counters.items():
            if stage != "batch":
                num_ahead += 2 * counter.most_at_once(self._cores)
        return num_ahead

    def _num_needed(self) -> int:
        if self._next_cut >= self._schedule.batches.stop:
            return self._num_admitted
        if self._needed[0] != self._next_cut:
            self._needed = self._next_cut, self._schedule.num_needed(self._next_cut)
        return self._needed[1]

    def _can_admit(self) -> bool:
        """Whether `_admit` should try the next row group; it raises for one that can never fit."""
        entry = None if self._is_batch_waiting else self._next_entry()
        if entry is None:
            return False
        num_ahead = self._num_admitted - self._num_needed()
        if self._charge_of(entry) > self._free_bytes():
            return num_ahead < 0 and not self._num_unsettled and not self._num_open
        return num_ahead < self._read_ahead() and not (num_ahead >= 0 and self._guard.is_short())

    def _next_entry(self) -> Entry | None:
        if self._entry is None or self._entry.sequence != self._num_admitted:
            self._entry = self._schedule.entry(self._num_admitted)
        return self._entry

    def _free_bytes(self) -> int:
        item_bytes = self._schedule.item_bytes
        return min(item_bytes - self._memory.items, max(item_bytes, self._limit_bytes) - self._memory.total)

    def _charge_of(self, entry: Entry) -> int:
        return math.ceil(entry.charge.admitted_bytes * self._expansion)

    def _admit(self) -> Job | None:
        if not self._can_admit():
            return None
        entry = self._next_entry()
        assert entry is not None
        charge_bytes = self._charge_of(entry)
        if charge_bytes > self._free_bytes():
            raise InputError(
                f"the memory limit of {self._limit_bytes:,} bytes is too small: "
                f"{self._reader.describe(entry.group)} takes {charge_bytes:,} bytes, "
                f"{self._expansion:.2f} times what its footer says, in addition to what its batch holds"
            )
        self._num_admitted += 1
        self._num_unsettled += 1
        self._memory.add(items=charge_bytes)
        heapq.heappush(self._retire, (entry.last_batch, entry.sequence))
        return Job(entry=entry, charge_bytes=charge_bytes)

    def _pass_on(self, stage: str, job: Job) -> Task | None:
        """The next task if the stage has room and nothing older waits; otherwise the job is queued."""
        waiting = self._queues[stage]
        if not waiting and self._active.has_room(stage):
            self._active.add(stage, 1)
            return stage, job
        heapq.heappush(waiting, (job.entry.sequence, job))
        return None

    def _settle(self, job: Job) -> None:
        """Keep a transformed row group until the last batch that needs it."""
        settled_bytes, kept_bytes = job.entry.charge.settled_bytes, job.payload.nbytes
        if kept_bytes > settled_bytes:  # wider than the footer promised: charge the next ones for that
            self._expansion = max(self._expansion, kept_bytes / settled_bytes)
        self._give_back(job, job.charge_bytes - kept_bytes)
        self._ready[job.entry.sequence] = job
        self._num_unsettled -= 1
        while self._num_ready in self._ready:
            self._num_ready += 1

    def _give_back(self, job: Job, num_bytes: int) -> None:
        job.charge_bytes -= num_bytes
        self._memory.add(items=-num_bytes)

    def _can_cut(self) -> bool:
        if self._next_cut >= self._schedule.batches.stop or self._num_open >= self._prefetch:
            return False
        return self._num_ready >= self._num_needed()

    def _take_cut(self) -> Assembly | None:
        """The next batch, if its row groups are ready and its bytes fit."""
        if not self._can_cut():
            return None
        self._schedule.forget(self._num_cut)
        cut = self._schedule.cut(self._next_cut)
        slices = [(self._ready[sequence].payload, start, stop) for sequence, start, stop in cut.slices]
        num_bytes = sum(block.batch_bytes(start, stop) for block, start, stop in slices)
        fits = self._memory.total + num_bytes <= self._limit_bytes
        # A batch of unusually wide rows takes precedence over new row groups: those in progress settle meanwhile.
        self._is_batch_waiting = not fits and (self._memory.batches > 0 or self._num_unsettled > 0)
        if self._is_batch_waiting:
            return None
        self._next_cut += 1
        self._num_open += 1
        self._memory.add(batches=num_bytes)
        return Assembly(cut=cut, slices=slices, num_bytes=num_bytes)

    def _finish_cut(self, assembly: Assembly, batch: Batch, num_bytes: int) -> None:
        self._outputs[assembly.cut.batch] = (batch, num_bytes)
        self._memory.add(batches=num_bytes - assembly.num_bytes)  # it was charged the upper bound
        self._is_awaited |= self._stalled_since is not None and assembly.cut.batch == self._next_out
        self._done_cuts.add(assembly.cut.batch)
        while self._num_cut in self._done_cuts:
            self._done_cuts.remove(self._num_cut)
            self._num_cut += 1
        while self._retire and self._retire[0][0] < self._num_cut:  # row groups that no later batch needs
            job = self._ready.pop(heapq.heappop(self._retire)[1])
            self._give_back(job, job.charge_bytes)
