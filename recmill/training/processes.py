"""What the launcher and the ranks agree on. Imports nothing heavy: the launcher has no need of torch."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ORPHAN_WAIT_S = 10.0  # ranks that outlive torchrun for this long do not know that it is gone
MXFAST, TRIM_THRESHOLD, MMAP_MAX = 1, -1, -4  # parameters of mallopt(3)
PROGRESS_MARK = "@progress "  # a line of a rank's output that starts so is progress: JSON [what, done, total]

# By default OpenMP threads spin for milliseconds while they wait for one another, and the reader's threads share their
# cores: on two cores with other work 3,600 to 9,200 samples/s, 40,000 if they sleep at once. But to wake one takes
# longer than most operations of a step, and two threads are no faster than one. So they spin for about as long as a
# wake-up takes: docs/recd.md.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "6000"}
# Milliseconds after which Arrow's pool gives pages back. By default 10, and the pipeline of every evaluation faults its
# own in again, 250 MB with row groups of 7 MB: docs/intune.md.
KEPT_PAGES = {"MIMALLOC_PURGE_DELAY": "10000"}


def rank_environment() -> dict[str, str]:
    """This process's variables and those a rank should run with besides; libraries read them when they are loaded."""
    waiting = {} if WAITING.keys() & os.environ.keys() else WAITING
    return {**KEPT_PAGES, **waiting, **os.environ}


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, however large, for what it allocates next.

    By default blocks of 32 MB and more go back to the kernel and the next step faults them in again. A quarter of an
    epoch of the transformer on the preset recd went there: 1,250 instead of 1,850 samples/s, for 2.6 instead of 2.9 GB
    at the peak. Where the user has set the allocator (MALLOC_MMAP_MAX_=65536 is its default) it stays as it is.

    And no lists of small blocks that wait to be joined: FBGEMM's update of rows that are not pooled makes and frees
    some for every id, and the next large block that is freed walks through all of them. Histories of 64 ids that
    never repeat train at 11,500 and 13,200 instead of 10,000 and 10,600 samples/s; other models as fast as before.
    """
    is_set = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other libraries have their own ways
    if mallopt is not None and not is_set:
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(MMAP_MAX, 0)
        mallopt(MXFAST, 0)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """While the block runs, garbage collections leave alone what exists when it begins.

    With everything that training imports, a full one looks at 400,000 objects, and all threads wait for 0.2 s.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # or modules complain at the end of the process that their objects were never freed


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
