"""What launchers and ranks agree on. Imports nothing heavy: a launcher does not need torch."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from recmill.artifacts import InputError, dump_record, is_remote, join_path, read_checked_json, write_text_atomically
from recmill.artifacts.places.scratch import LOCK_FILE
from recmill.artifacts.places.stores import scratch_folder

LOCK_WAIT_S = 15
OWNER_FILE = "owner.json"  # in a remote folder of a run: which launch may write to it
ORPHAN_WAIT_S = 10.0  # ranks that outlive torchrun for this long have not noticed that it is gone
STOPPED_CHECK_S = 5.0
MXFAST, TRIM_THRESHOLD, MMAP_MAX = 1, -1, -4  # parameters of mallopt(3)
_PINNED: list[int] = []  # this process's rank, while it keeps to its share of the cores
LOCAL = (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # torchrun's variables, and what they are without it
REPEATS = "repeats trained"  # progress of ranks that train several jobs one after the other
PROGRESS_MARK = "@progress "  # a line of a rank's output that starts so is progress: JSON [what, done, total]

# By default OpenMP threads spin for milliseconds while they wait for one another, and the reader's threads share their
# cores: 3,600 to 9,200 samples/s on two busy cores, 40,000 if waiting threads sleep at once. But waking a thread takes
# longer than most operations of a step, and two threads are then no faster than one. So they spin for about as long as
# a wake-up takes: docs/recd.md.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "6000"}
# Milliseconds after which Arrow's pool returns pages. With the default of 10 the pipeline of every evaluation faults
# its pages in again, 250 MB with row groups of 7 MB: docs/intune.md.
KEPT_PAGES = {"MIMALLOC_PURGE_DELAY": "10000"}


def print_progress(what: str, done: int, total: int) -> None:
    """Progress as a line that launchers read."""
    print(PROGRESS_MARK + json.dumps([what, done, total]), flush=True)


def rank_variables(threads: int = 0) -> dict[str, str]:
    """Environment variables of every rank, on this machine or in a pod; libraries read them when they are loaded.

    What the user has set in this process's environment wins. `threads` 0 leaves their number as it is.
    """
    chosen = {**KEPT_PAGES, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    waiting = {name: os.environ[name] for name in WAITING if name in os.environ} or WAITING
    own = {name: os.environ.get(name, value) for name, value in chosen.items()}
    return {**own, **waiting, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}


def rank_environment(threads: int = 0) -> dict[str, str]:
    """The environment of a rank on this machine: this process's own with `rank_variables`."""
    return {**os.environ, **rank_variables(threads)}


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, however large the block, for later allocations of this process.

    By default blocks of 32 MB and more are returned to the kernel and the next step faults them in again. That took a
    quarter of an epoch of the transformer on the preset recd: 1,250 instead of 1,850 samples/s, with a peak of 2.6
    instead of 2.9 GB. A user's own settings of the allocator win (MALLOC_MMAP_MAX_=65536 is its default).

    Small freed blocks are joined at once: FBGEMM's update of unpooled rows allocates and frees some per id, and the
    next large block that is freed walks through all of them. Histories of 64 ids that never repeat train at 11,500 and
    13,200 instead of 10,000 and 10,600 samples/s; other models are as fast as before.
    """
    is_set = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None and not is_set:
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(MMAP_MAX, 0)
        mallopt(MXFAST, 0)


def return_freed_memory() -> None:
    """Give freed memory back to the kernel, and start to measure this process's peak memory anew."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def paused_collections() -> Iterator[None]:
    """No garbage collections while the block imports: they find nothing and take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """While the block runs, garbage collections skip the objects that exist when it begins.

    With everything that training imports, a full collection visits 400,000 objects, and all threads wait for 0.2 s.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # otherwise modules complain at exit about objects that were never freed


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads of torch's operators in the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of(config_threads: int, num_local: int) -> int:
    """Threads per process of `num_local` on this machine: the config's, or an equal share of the cores."""
    return config_threads or max(1, (os.cpu_count() or 1) // num_local)


@contextmanager
def own_cores(*, threads: int) -> Iterator[None]:
    """Keep this rank's threads on its share of the machine's cores in the block, if there is a core for each.

    Linux may wake a rank that receives a message on the core of the rank that sent it, and leave both there until its
    next tick, up to 4 ms later (docs/auto.md).
    """
    from recmill.tuning.cores import available_cores  # not light

    num_local, rank = (int(os.environ.get(name, default)) for name, default in LOCAL)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // num_local
    is_pinned = num_local > 1 and share >= threads and available_cores() == len(cores)  # a quota is no set of cores
    if is_pinned:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
        _PINNED.append(rank)
    try:
        yield
    finally:
        if is_pinned:
            _PINNED.pop()
            os.sched_setaffinity(0, cores)


def num_sharing() -> int:
    """The processes of this launch that share the cores of this one."""
    return 1 if _PINNED else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no orphan keeps writing into the run."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


@contextmanager
def hold_folder(folder: str, *, what: str = "training") -> Iterator[None]:
    """Refuse a second training, or `what` else writes, in `folder`. Ranks that were just killed get time to exit.

    Of a remote folder this is known for this machine only; `check_owner` is about the others.
    """
    local = scratch_folder(folder, "lock") if is_remote(folder) else Path(folder)
    local.mkdir(exist_ok=True)
    with open(local / LOCK_FILE, "w") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(f"{folder}: another {what} is writing to this folder") from None
                time.sleep(0.2)
        yield


def take_folder(folder: str) -> str:
    """Become the owner of a remote folder: an earlier launch on another machine ends with its next checkpoint."""
    if not is_remote(folder):
        return ""
    owner = uuid.uuid4().hex
    write_text_atomically(join_path(folder, OWNER_FILE), dump_record({"kind": "owner", "owner": owner}))
    return owner


def check_owner(folder: str, owner: str) -> None:
    """Raise if another launch has taken the folder."""
    if owner and read_checked_json(join_path(folder, OWNER_FILE), kind="owner")["owner"] != owner:
        raise InputError(f"{folder}: another training has taken over this folder")


class Waitable(Protocol):
    """A process that somebody started."""

    def wait(self) -> int: ...


@contextmanager
def ending_orphans(launcher: Waitable, job: str) -> Iterator[None]:
    """While the block reads the ranks' output, kill ranks of `job` that outlive torchrun: they keep the output open.

    If torchrun is killed (out of memory) while its ranks still import, they have not asked to die with it yet.
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


@contextmanager
def ending_stopped(timeout_s: float, *, others: Sequence[int] = ()) -> Iterator[list[str]]:
    """While the block runs, kill processes below this one that are stopped (SIGSTOP) for `timeout_s`; says which.

    Whoever waits for a stopped process takes it for a slow one. `others` are watched too, with the processes below
    them. Only time in which this process runs counts: Ctrl-Z stops all of them, and fg continues them.
    """
    is_done, said, seen_s = threading.Event(), list[str](), dict[psutil.Process, float]()
    pause_s = min(STOPPED_CHECK_S, timeout_s / 4)

    def look() -> None:
        stopped = [process for process in _family(others) if _is_stopped(process)]
        for process in [known for known in seen_s if known not in stopped]:
            del seen_s[process]
        for process in stopped:
            seen_s[process] = seen_s.get(process, -pause_s) + pause_s
            if seen_s[process] >= timeout_s:
                said.append(f"process {process.pid} was stopped (SIGSTOP) for {timeout_s:g} s")
                with suppress(psutil.Error):
                    process.kill()

    def watch() -> None:
        while not is_done.wait(pause_s):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield said
    finally:
        is_done.set()


def _family(others: Sequence[int]) -> list[psutil.Process]:
    """The processes below this one, `others`, and those below them."""
    found = set(psutil.Process().children(recursive=True))
    for pid in others:
        with suppress(psutil.Error):
            own = psutil.Process(pid)
            found |= {own, *own.children(recursive=True)}
    return list(found)


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _processes_of(job: str) -> list[int]:
    """Other processes whose command line names the job's file."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if job.encode() in (folder / "cmdline").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
