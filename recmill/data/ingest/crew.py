"""Worker threads that run any task; none of them belongs to a stage.

A thread carries an item on to the next stage while its data is in the cache; only an item that finds no room there
waits in a queue. So an item costs one wake-up instead of one per stage. Code that makes work available calls `wake`;
the thread that wakes up takes a task and wakes the next one. No thread wakes up in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

# Sleeping threads check this often whether the pipeline was garbage-collected: the one case in which nobody wakes them.
WAKE_S = 1.0


class Crew(Generic[Task, Result]):
    """Runs tasks in as many threads as `resize` sets until `is_over`. Only `perform` runs without the lock."""

    def __init__(
        self,
        lock: threading.RLock,
        *,
        take: Callable[[], Task | None],
        has_task: Callable[[], bool],
        perform: Callable[[Task], Result],
        finish: Callable[[Task, Result], Task | None],
        is_over: Callable[[], bool],
    ) -> None:
        """`take` returns a task and `has_task` tells whether it would; `perform` runs one. `finish` gets its result and
        may return a successor.
        """
        self._lock, self._sleepers = lock, threading.Condition(lock)
        self._take, self._has_task, self._is_over = take, has_task, is_over
        self._perform, self._finish = perform, finish
        self._size = self._num_asleep = 0
        self._is_called = False  # a thread was woken and has not looked for a task yet
        self._alive: set[int] = set()
        self._threads: dict[int, threading.Thread] = {}

    def resize(self, num_threads: int) -> None:
        """Start missing threads; surplus ones exit after their current task."""
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
        """Wake one thread, if one sleeps and there is a task."""
        if self._num_asleep and not self._is_called and self._has_task():
            self._is_called = True
            self._sleepers.notify()

    def wake_all(self) -> None:
        self._sleepers.notify_all()

    def join(self) -> None:
        """Wait until all threads have exited."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self, index: int) -> None:
        done: tuple[Task, Result] | None = None
        while True:
            with self._lock:  # once per task: to finish one and take the next
                task = self._finish(*done) if done else None
                done = None  # a thread that sleeps keeps no memory alive
                task = task or self._await_task(index)
                if task is None:
                    self._alive.discard(index)
                    self.wake()  # pass on the task that this one was woken for
                    return
            done = task, self._perform(task)

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
