"""Worker threads that turn a schedule of row groups into batches, in order, within a budget of bytes.

    schedule --admit--> read --> decode --> transform --> [reorder] --> batch --> [reorder] --> consumer
               |                                                          |                        |
               +--<-- credit of row groups no batch needs any more -------+      +--<-- a free slot+

Row groups are admitted in sequence order, which is the order in which batches need them, and admission is where
memory is charged. So the oldest row group always holds its credit already and a full budget cannot block the batch
that would free it. A stage has at most as many items in hand as it has workers: one that shrinks drains. Nor has it
more than keep all cores busy, so that too many workers do no harm.

Without an order, batches are cut as their row groups arrive and handed out as they are made; admission stays the same.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from recmill.artifacts import InputError
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest.clock import Clock, Taken
from recmill.data.ingest.crew import WAKE_S, Crew
from recmill.data.ingest.memory import Budget, MemoryGuard
from recmill.data.ingest.schedule import Entry, Schedule
from recmill.data.ingest.stages import STAGES, PlainReader
from recmill.data.ingest.statistics import MemoryCounter, StageCounter
from recmill.data.ingest.tasks import FOLLOWING, Assembly, Job, Task
from recmill.data.ingest.work import RowGroupWork, never_waits


class Engine:
    """Runs the stages. Thread-safe; `next_batch` is for one consumer."""

    def __init__(
        self,
        reader: PlainReader,
        schedule: Schedule,
        *,
        workers: Mapping[str, int],
        prefetch: int,
        budget: Budget,
        guard: MemoryGuard,
        is_ordered: bool = True,
        skipped: Iterable[int] = (),
    ) -> None:
        """`skipped`: batches of the schedule that were handed out before."""
        self._reader, self._schedule, self._guard = reader, schedule, guard
        self._work_on = RowGroupWork(reader)
        self._is_ordered = is_ordered
        self._prefetch, self._limit_bytes = prefetch, budget.limit_bytes
        # Re-entrant: a garbage collection under the lock may finalise the pipeline, which calls request_stop.
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._cores = len(os.sched_getaffinity(0))
        self._counters = {
            stage: StageCounter(workers=workers[stage], core_share=float(never_waits(reader, stage)))
            for stage in STAGES
        }
        self._num_active = dict.fromkeys(STAGES, 0)  # items in hand
        self._memory = MemoryCounter()
        self._queues: dict[str, list[tuple[int, Job]]] = {"decode": [], "transform": []}
        self._num_admitted = self._num_ready = 0  # row groups admitted; ready without a gap
        self._num_unsettled = 0  # row groups between admission and the end of their transformation
        self._is_batch_waiting = False  # for bytes
        self._blocks: dict[int, Job] = {}
        self._retire: list[tuple[int, int]] = []  # heap of (last batch that needs it, sequence)
        self._expansion = 1.0  # bytes of the widest row group so far over what its footer promised
        self._next_cut = self._num_cut = self._next_out = schedule.batches.start
        self._taken_cuts, self._done_cuts, self._handed_out = set(skipped), set(skipped), set(skipped)
        self._outputs: dict[int, tuple[Batch, int]] = {}
        self._num_open = 0  # batches that are being cut or wait
        self._num_out = 0
        self._pass_marks()
        self._error: BaseException | None = None
        self._is_stopped = False
        self._started = time.perf_counter()
        self._stall_s = 0.0
        self._stalled_since: float | None = None
        self._rows_out = 0
        self._crew: Crew[Task] = Crew(
            self._lock, take=self._take, has_task=self._has_task, do=self._do, is_over=self._is_over
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
        """Tell the workers to end after the item in hand. Safe to call from anywhere, a finaliser included."""
        self._is_stopped = True
        if self._lock.acquire(blocking=False):
            try:
                self._crew.wake_all()
                self._arrived.notify_all()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """End all workers and wait until they are gone."""
        with self._lock:
            self.request_stop()
        self._crew.join()
        with self._lock:
            self._blocks.clear()
            self._outputs.clear()
            for queue in self._queues.values():
                queue.clear()
        self._work_on.close()

    def _pass_marks(self) -> None:
        """Move each mark past the batches that are behind it already."""
        while self._next_cut in self._taken_cuts:
            self._taken_cuts.remove(self._next_cut)
            self._next_cut += 1
        while self._num_cut in self._done_cuts:
            self._done_cuts.remove(self._num_cut)
            self._num_cut += 1
        while self._next_out in self._handed_out:
            self._handed_out.remove(self._next_out)
            self._next_out += 1

    def _arrived_batch(self) -> int | None:
        if self._is_ordered:
            return self._next_out if self._next_out in self._outputs else None
        return min(self._outputs, default=None)

    def next_batch(self) -> tuple[int, Batch] | None:
        """The next batch with its number, or None after the last; raises what a worker raised."""
        with self._lock:
            if self._next_out >= self._schedule.batches.stop:
                return None
            if self._arrived_batch() is None:
                began = self._stalled_since = time.perf_counter()
                while self._arrived_batch() is None and self._error is None and not self._is_stopped:
                    self._arrived.wait(WAKE_S)
                self._stall_s += time.perf_counter() - began
                self._stalled_since = None
            if self._error is not None:
                raise self._error
            if self._is_stopped:
                raise RuntimeError("the ingest pipeline was closed while it was read")
            number = self._arrived_batch()
            assert number is not None
            batch, num_bytes = self._outputs.pop(number)
            self._handed_out.add(number)
            self._pass_marks()
            self._num_open -= 1
            self._num_out += 1
            self._rows_out += len(batch)
            self._memory.add(batches=-num_bytes)
            self._crew.wake()
            return number, batch

    def stats(self) -> dict[str, Any]:
        with self._lock:
            now = time.perf_counter()
            elapsed_s = now - self._started
            waits_s = 0.0 if self._stalled_since is None else now - self._stalled_since
            queues = {
                "read": 0,
                "decode": len(self._queues["decode"]),
                "transform": len(self._queues["transform"]),
                "batch": self._num_ready - min(self._num_ready, self._num_needed()),
            }
            summaries: dict[str, Any] = {
                stage: counter.summary(elapsed_s=elapsed_s, queue=queues[stage], queue_size=self._read_ahead())
                for stage, counter in self._counters.items()
            }
            for stage in self._work_on.in_processes:
                summaries[stage]["in_processes"] = True
            summaries["consumer"] = {
                "batches": self._num_out,
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

    def _take(self) -> Task | None:
        """Something to do, nearest to the consumer first."""
        for stage in reversed(STAGES):
            if self._has_room(stage):
                try:
                    task = self._take_from(stage)
                except InputError as error:
                    self._fail(stage, None, error)
                    return None
                if task is not None:
                    self._num_active[stage] += 1
                    return stage, task
        return None

    def _take_from(self, stage: str) -> Job | Assembly | None:
        if stage == "batch":
            return self._take_cut()
        return self._admit() if stage == "read" else self._pop(stage)

    def _has_room(self, stage: str) -> bool:
        return self._num_active[stage] < self._counters[stage].most_at_once(self._cores)

    def _has_task(self) -> bool:
        """Whether `_take` would find something or fail; now and then it is mistaken and finds nothing."""
        if any(queue and self._has_room(stage) for stage, queue in self._queues.items()):
            return True
        try:
            return (self._has_room("batch") and self._can_cut()) or (self._has_room("read") and self._can_admit())
        except InputError:
            return True

    def _can_cut(self) -> bool:
        if self._next_cut >= self._schedule.batches.stop or self._num_open >= self._prefetch:
            return False
        is_next_ready = self._num_ready >= self._schedule.num_needed(self._next_cut)
        return is_next_ready or (bool(self._blocks) and not self._is_ordered)

    def _fail(self, stage: str, task: Job | Assembly | None, error: BaseException) -> None:
        if isinstance(task, Job) and not isinstance(error, InputError):
            error.add_note(f"in stage {stage!r} of {self._reader.describe(task.entry.group)}")
        with self._lock:
            self._error = self._error or error
            self._crew.wake_all()
            self._arrived.notify_all()

    def _do(self, task: Task) -> Task | None:
        """Do it; gives the next stage of the same row group if there is room."""
        stage, item = task
        try:
            result, rows, num_bytes, taken = self._perform(stage, item)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self._fail(stage, item, error)
            return None
        with self._lock:
            self._counters[stage].add(rows=rows, num_bytes=num_bytes, taken=taken)
            self._num_active[stage] -= 1
            if isinstance(item, Assembly):
                self._finish_cut(item, result, num_bytes)
                return None
            item.payload = result
            if stage not in FOLLOWING:
                self._settle(item)
                return None
            following = self._pass_on(FOLLOWING[stage], item)
            self._crew.wake()
            return following

    def _perform(self, stage: str, item: Job | Assembly) -> tuple[Any, int, int, Taken]:
        """The result, its rows and bytes, and what it took."""
        if isinstance(item, Assembly):
            clock = Clock()
            batch = self._reader.assemble(item.slices, num_global=item.cut.num_global)
            taken = clock.lap()
            return batch, len(batch), min(item.num_bytes, batch.size_in_bytes()), taken
        group, workers = item.entry.group, self._counters[stage].workers
        result, taken = self._work_on.do(stage, group, item.payload, workers=workers)
        return result, group.num_rows, result.nbytes, taken

    def _read_ahead(self) -> int:
        """How many row groups beyond those the next batch needs may be on their way."""
        return 2 * sum(
            counter.most_at_once(self._cores) for stage, counter in self._counters.items() if stage != "batch"
        )

    def _num_needed(self) -> int:
        if self._next_cut >= self._schedule.batches.stop:
            return self._num_admitted
        return self._schedule.num_needed(self._next_cut)

    def _can_admit(self) -> bool:
        """Whether the next row group may come in. Raises nothing: one that never can is found by `_admit`."""
        entry = None if self._is_batch_waiting else self._schedule.entry(self._num_admitted)
        if entry is None:
            return False
        num_ahead = self._num_admitted - self._num_needed()
        if self._charge_of(entry) > self._free_bytes():
            return num_ahead < 0 and not self._num_unsettled and not self._num_open
        return num_ahead < self._read_ahead() and not (num_ahead >= 0 and self._guard.is_short())

    def _free_bytes(self) -> int:
        item_bytes = self._schedule.item_bytes
        return min(item_bytes - self._memory.items, max(item_bytes, self._limit_bytes) - self._memory.total)

    def _charge_of(self, entry: Entry) -> int:
        return math.ceil(entry.charge.admitted_bytes * self._expansion)

    def _admit(self) -> Job | None:
        if not self._can_admit():
            return None
        entry = self._schedule.entry(self._num_admitted)
        assert entry is not None
        charge_bytes = self._charge_of(entry)
        if charge_bytes > self._free_bytes():
            raise InputError(self._too_wide(entry, charge_bytes))
        self._num_admitted += 1
        self._num_unsettled += 1
        self._memory.add(items=charge_bytes)
        heapq.heappush(self._retire, (entry.last_batch, entry.sequence))
        return Job(entry=entry, charge_bytes=charge_bytes)

    def _too_wide(self, entry: Entry, charge_bytes: int) -> str:
        return (
            f"the memory limit of {self._limit_bytes:,} bytes is too small: {self._reader.describe(entry.group)} takes "
            f"{charge_bytes:,} bytes, {self._expansion:.2f} times what its footer says, beside what its batch holds"
        )

    def _pop(self, stage: str) -> Job | None:
        queue = self._queues[stage]
        return heapq.heappop(queue)[1] if queue else None

    def _pass_on(self, stage: str, job: Job) -> Task | None:
        """On to the stage at once if it has room and nothing older waits, else into its queue."""
        queue = self._queues[stage]
        if not queue and self._has_room(stage):
            self._num_active[stage] += 1
            return stage, job
        heapq.heappush(queue, (job.entry.sequence, job))
        return None

    def _settle(self, job: Job) -> None:
        """Keep a row group whose work is done until the last batch that needs it."""
        settled_bytes, kept_bytes = job.entry.charge.settled_bytes, job.payload.nbytes
        if kept_bytes > settled_bytes:  # wider than the footer promised: the next ones are charged for that
            self._expansion = max(self._expansion, kept_bytes / settled_bytes)
        self._give_back(job, job.charge_bytes - kept_bytes)
        self._blocks[job.entry.sequence] = job
        self._num_unsettled -= 1
        if job.entry.sequence == self._num_ready or self._is_batch_waiting or not self._is_ordered:
            while self._num_ready in self._blocks:
                self._num_ready += 1
            self._retire_blocks()

    def _give_back(self, job: Job, num_bytes: int) -> None:
        job.charge_bytes -= num_bytes
        self._memory.add(items=-num_bytes)

    def _take_cut(self) -> Assembly | None:
        """A batch to assemble: the next one, or without an order any, whose row groups are ready and bytes fit."""
        if not self._can_cut():
            return None
        self._schedule.forget(self._num_cut)
        if self._num_ready >= self._schedule.num_needed(self._next_cut):
            return self._try_cut(self._next_cut, is_first=True)
        if self._is_ordered:
            return None
        stop = min(self._schedule.batches.stop, self._next_cut + 2 * self._prefetch)
        for number in set(range(self._next_cut + 1, stop)) - self._taken_cuts:
            if all(sequence in self._blocks for sequence, _, _ in self._schedule.cut(number).slices):
                found = self._try_cut(number, is_first=False)
                if found:
                    return found
        return None

    def _try_cut(self, number: int, *, is_first: bool) -> Assembly | None:
        cut = self._schedule.cut(number)
        slices = [(self._blocks[sequence].payload, start, stop) for sequence, start, stop in cut.slices]
        num_bytes = sum(block.batch_bytes(start, stop) for block, start, stop in slices)
        fits = self._memory.total + num_bytes <= self._limit_bytes
        if is_first:
            # A batch of unusually wide rows takes precedence over new row groups: those on their way settle meanwhile.
            self._is_batch_waiting = not fits and (self._memory.batches > 0 or self._num_unsettled > 0)
        if self._is_batch_waiting or not (fits or is_first):
            return None
        self._taken_cuts.add(number)
        self._pass_marks()
        self._num_open += 1
        self._memory.add(batches=num_bytes)
        return Assembly(cut=cut, slices=slices, num_bytes=num_bytes)

    def _finish_cut(self, assembly: Assembly, batch: Batch, num_bytes: int) -> None:
        self._outputs[assembly.cut.batch] = (batch, num_bytes)
        self._memory.add(batches=num_bytes - assembly.num_bytes)  # it was charged for the most it could take
        self._arrived.notify()
        self._done_cuts.add(assembly.cut.batch)
        self._pass_marks()
        self._retire_blocks()

    def _retire_blocks(self) -> None:
        """Drop the row groups no coming batch needs. One that only skipped batches need may still be on its way."""
        while self._retire and self._retire[0][0] < self._num_cut and self._retire[0][1] < self._num_ready:
            job = self._blocks.pop(heapq.heappop(self._retire)[1])
            self._give_back(job, job.charge_bytes)
