"""What the launcher and the ranks agree on. Imports nothing heavy: the launcher has no need of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PROGRESS_MARK = "@progress "  # a line of a rank's output that starts so is progress: JSON [what, done, total]


def threads_of(config_threads: int, num_local: int) -> int:
    """Threads of each of `num_local` processes on this machine: the config's, or an equal share of the cores."""
    return config_threads or max(1, (os.cpu_count() or 1) // num_local)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no orphan goes on writing into the run."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
