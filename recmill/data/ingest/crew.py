"""Threads that do whatever there is to do; none of them belongs to a stage.

A thread takes an item on to the next stage while its data are in the cache, and only what finds no room there waits in
a queue. So an item costs one wake-up instead of one a stage. Who changes something calls `wake`, and whoever is woken
takes work and wakes the next: no thread is woken for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Task = TypeVar("Task")

# A thread that sleeps looks up this often, for the one case in which nobody wakes it: the pipeline was collected.
WAKE_S = 1.0


class Crew(Generic[Task]):
    """Runs tasks in `resize`d threads until `is_over`. All but `do` is called under the lock."""

    def __init__(
        self,
        lock: threading.RLock,
        *,
        take: Callable[[], Task | None],
        has_task: Callable[[], bool],
        do: Callable[[Task], Task | None],
        is_over: Callable[[], bool],
    ) -> None:
        """`take` gives a task, `has_task` says whether it would, `do` does one and may give the task that follows."""
        self._lock, self._sleepers = lock, threading.Condition(lock)
        self._take, self._has_task, self._do, self._is_over = take, has_task, do, is_over
        self._size = self._num_asleep = 0
        self._is_called = False  # somebody was woken and has not looked yet
        self._alive: set[int] = set()
        self._threads: dict[int, threading.Thread] = {}

    def resize(self, num_threads: int) -> None:
        """Start what is missing; threads that are too many end after the task in hand."""
        with self._lock:
            if self._is_over():
                return
            self._size = num_threads
            for index in set(range(num_threads)) - self._alive:
                thread = threading.Thread(target=self._work, args=(index,), name=f"ingest-{index}", daemon=True)
                self._alive.add(index)
                self._threads[index] = thread
                thread.start()
            self._sleepers.notify_all()

    def wake(self) -> None:
        """One thread, if one sleeps and there is something to do."""
        if self._num_asleep and not self._is_called and self._has_task():
            self._is_called = True
            self._sleepers.notify()

    def wake_all(self) -> None:
        self._sleepers.notify_all()

    def join(self) -> None:
        """Wait until all threads have ended."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self, index: int) -> None:
        task: Task | None = None
        while True:
            if task is None:
                with self._lock:
                    task = self._await_task(index)
                    if task is None:
                        self._alive.discard(index)
                        self.wake()  # whatever this one was woken for
                        return
            task = self._do(task)

    def _await_task(self, index: int) -> Task | None:
        while not self._is_over() and index < self._size:
            task = self._take()
            if task is not None:
                self.wake()
                return task
            self._num_asleep += 1
            self._sleepers.wait(WAKE_S)
            self._num_asleep -= 1
            self._is_called = False
        return None
