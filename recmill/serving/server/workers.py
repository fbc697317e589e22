"""Several workers on one port: a parent that starts them, starts lost ones again, and stops them together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from recmill.artifacts import InputError, held_folder
from recmill.serving.server.settings import ServerSettings

RESTART_S, MAX_RESTART_S = 1.0, 60.0  # from one start of a worker to the next; doubles while it fails
MAX_FAILURES = 3  # starts in a row after which a worker has not served
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SHARED_MEMORY = Path("/dev/shm")
SERVES = "\0"  # what a worker tells its parent; anything else is why it cannot start

logger = logging.getLogger("recmill.serve")


@contextmanager
def shared_metrics() -> Iterator[None]:
    """A folder in which the workers put their counts, so that any of them can show all.

    In memory: the files are mapped, and a full disk would end the workers with SIGBUS.
    """
    if METRICS_VARIABLE in os.environ:
        yield
        return
    beside = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with held_folder(purpose="serve", beside=beside) as folder:
        os.environ[METRICS_VARIABLE] = str(folder)
        yield


def tell_parent(settings: ServerSettings, what: str = SERVES) -> bool:
    """Tell the parent of this worker that it serves, or why it cannot. False if this process is no worker."""
    if settings.parent_pipe < 0:
        return False
    with suppress(BrokenPipeError):  # the parent is gone
        os.write(settings.parent_pipe, what.encode())
    return True


class Worker:
    """A process that serves, with its number, and the next ones if it is lost."""

    def __init__(self, settings: ServerSettings, command: Sequence[str]) -> None:
        self._settings, self._command = settings, command
        self.failures = 0  # starts in a row that did not lead to serving
        self.serves = False
        self.problem = ""  # why the last start failed
        self.cannot_start = False  # it said so
        self.start()

    def start(self) -> None:
        self._pipe, given = os.pipe()
        os.set_blocking(self._pipe, False)
        argument = replace(self._settings, parent_pipe=given).to_argument()
        self._began_s, self._is_lost, self._said = time.monotonic(), False, b""
        die_with_us = partial(die_with_parent, os.getpid())
        self.process = subprocess.Popen([*self._command, argument], preexec_fn=die_with_us, pass_fds=[given])
        os.close(given)

    def look(self) -> None:
        """Notice that it serves or was lost, and start it again when it is time."""
        code = self.process.poll()
        if not self._is_lost:
            with suppress(BlockingIOError):
                while piece := os.read(self._pipe, 4096):
                    self._said += piece
            self.serves = SERVES.encode() in self._said
            self.failures = 0 if self.serves else self.failures
        if code is None:
            return
        if not self._is_lost:
            self._note_end(code)
        pause_s = min(MAX_RESTART_S, RESTART_S * 2 ** max(0, self.failures - 1))
        if time.monotonic() - self._began_s >= pause_s:
            logger.warning("worker %d %s: starting it again", self._settings.worker, self.problem)
            self.start()

    def _note_end(self, code: int) -> None:
        os.close(self._pipe)
        self.failures += not self.serves
        self.cannot_start = code == 2 and self._said != b"" and not self.serves
        self.problem = self._said.decode() if self.cannot_start else f"ended with {describe_code(code)}"
        self._is_lost, self.serves = True, False
        for path in Path(os.environ[METRICS_VARIABLE]).glob(f"gauge_live*_{self.process.pid}.db"):
            path.unlink(missing_ok=True)


def describe_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name} (too little memory?)" if -code == signal.SIGKILL else name


def supervise(settings: ServerSettings, command: Sequence[str]) -> int:
    """Run the workers until SIGTERM or SIGINT. InputError with the reason if none of them can serve."""
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    workers = [Worker(replace(settings, worker=number), command) for number in range(settings.workers)]
    try:
        while not is_stopping:
            time.sleep(LOOK_S)
            for worker in workers:
                worker.look()
            if problem := reason_to_end(workers):
                raise InputError(problem)
    finally:
        _stop_all(workers, settings.drain_s + settings.grace_s + 5)
    return 0


def reason_to_end(workers: Sequence[Worker]) -> str:
    """Why there is no use in further starts, or "". While one worker serves, the others are tried on."""
    if any(worker.serves for worker in workers):
        return ""
    if (told := next((worker for worker in workers if worker.cannot_start), None)) is not None:
        return told.problem
    if all(worker.failures >= MAX_FAILURES for worker in workers):
        return (
            f"each of {len(workers)} workers was started {MAX_FAILURES} times and {workers[0].problem} before it served"
        )
    return ""


def _stop_all(workers: Sequence[Worker], limit_s: float) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.terminate()
    deadline_s = time.monotonic() + limit_s
    for worker in workers:
        try:
            worker.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def die_with_parent(parent: int) -> None:
    """In a new worker, before its programme: end when the parent ends, which may have happened already."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the parent's handlers would swallow the signal
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
