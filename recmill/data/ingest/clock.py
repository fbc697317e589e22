"""Where the time of a worker thread goes: on a core, waiting for one, or waiting for something else."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_SCHEDULER_FILE = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds runnable but without one
_opened = threading.local()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Seconds of one piece of work."""

    seconds: float  # by the wall clock
    cpu_seconds: float
    queued_seconds: float  # it could have run and had no core

    @property
    def service_seconds(self) -> float:
        """What it takes a worker that never waits for a core."""
        return max(self.cpu_seconds, self.seconds - self.queued_seconds)

    @property
    def blocked_seconds(self) -> float:
        """It waited for something other than a core: a device, a lock, the GIL."""
        return max(0.0, self.seconds - self.cpu_seconds - self.queued_seconds)


def _queued_s() -> float:
    """Seconds that this thread has waited for a core; 0 where the system does not say."""
    if not hasattr(_opened, "file"):
        # Left open: 2 instead of 15 microseconds a look. It closes with the thread's locals.
        _opened.file = _SCHEDULER_FILE.open("rb", buffering=0) if _SCHEDULER_FILE.exists() else None
    return int(os.pread(_opened.file.fileno(), 64, 0).split()[1]) / 1e9 if _opened.file else 0.0


class Clock:
    """Times laps of the thread that made it."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), _queued_s()

    def lap(self) -> Taken:
        """Since the last lap."""
        now = self._now()
        wall, cpu, queued = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return Taken(seconds=wall, cpu_seconds=cpu, queued_seconds=queued)
