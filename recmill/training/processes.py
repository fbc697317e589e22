"""What the launcher and the ranks agree on. Imports nothing heavy: the launcher has no need of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ORPHAN_WAIT_S = 10.0  # ranks that outlive torchrun for this long do not know that it is gone
PROGRESS_MARK = "@progress "  # a line of a rank's output that starts so is progress: JSON [what, done, total]


def threads_of(config_threads: int, num_local: int) -> int:
    """Threads of each of `num_local` processes on this machine: the config's, or an equal share of the cores."""
    return config_threads or max(1, (os.cpu_count() or 1) // num_local)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no orphan goes on writing into the run."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


@contextmanager
def ending_orphans(launcher: subprocess.Popen[str], job: str) -> Iterator[None]:
    """While the block reads what ranks say, end those of `job` that outlive their launcher: they keep its output open.

    A launcher killed for want of memory while its ranks still import has ranks that never asked to die with it.
    """
    is_done = threading.Event()

    def watch() -> None:
        launcher.wait()
        if not is_done.wait(ORPHAN_WAIT_S):
            for pid in _processes_of(job):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _processes_of(job: str) -> list[int]:
    """Other processes whose command line names the file of the job."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if job.encode() in (folder / "cmdline").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
