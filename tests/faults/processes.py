"""Commands as processes: how they are started, and what is left of them.

A command runs in a folder of its own, with its output, its temporary folder and its home in it, so that everything it
leaves behind is seen. Most run as forks of one process that has loaded what they import: a case takes a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MARK = "RECMILL_FAULT_CASE"  # in the environment of every process of a case
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments with OUT for the output; `result` gives what must be equal after every fault."""

    name: str
    arguments: tuple[str, ...]
    result: Callable[[str, str], Any]  # (output, standard output)
    kills: int  # of 100 over all commands
    forks: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "recmill"
    own: int = 0  # number of processes of the campaign's own before those that faults are about


@dataclass(kw_only=True)
class Process:
    """A command that was started."""

    pid: int
    folder: Path
    mark: str
    own: int = 0
    started: float = field(default_factory=time.monotonic)
    status: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.status

    def targets(self) -> list[psutil.Process]:
        """The processes that faults are about."""
        return self.family()[self.own :]

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def said(self, name: str = "stderr") -> str:
        return output_file(self.folder, name).read_text(errors="replace")


def output_file(folder: Path, name: str) -> Path:
    """What a command prints, beside its folder, which may be full or read-only."""
    return folder.with_name(f"{folder.name}.{name}")


def load_everything() -> None:
    """What forked commands import."""
    import recmill.cli.data
    import recmill.cli.generate
    import recmill.cli.init
    import recmill.cli.layout
    import recmill.cli.planning
    import recmill.cli.report
    import recmill.cli.training
    import recmill.cli.tuning
    import recmill.data.cluster.duckdb_engine
    import recmill.data.preparation.prepared_log
    import recmill.planning.planner
    import recmill.profiling.access
    import recmill.training.prediction.predictor
    import recmill.training.rank.worker
    import recmill.training.serving
    import recmill.training.tensors.conversion
    import recmill.tuning.allocation
    import recmill.tuning.conversion  # noqa: F401


def start(
    command: Command,
    folder: Path,
    *,
    out: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    before: Callable[[], None] = lambda: None,
    more: Sequence[str] = (),
) -> Process:
    """Start a command in the folder of a case; with a `prefix` (ip netns exec ...) as a programme of its own.

    `before` is called in the new process.
    """
    with contextlib.suppress(OSError):  # read-only
        (folder / "tmp").mkdir(exist_ok=True, parents=True)
    arguments = [part.replace("OUT", out or str(folder / "out")) for part in (*command.arguments, *more)]
    mark = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    added = {
        MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "RECMILL_TRACKING": "off",
        "PYTHONPATH": str(ROOT),
        "RECMILL_STORE_ATTEMPTS": "3",
        **command.environment,
        **(environment or {}),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("stdout", "stderr"):  # before it can be killed
        output_file(folder, name).write_bytes(b"")
    is_forked = command.forks and not prefix and "LD_PRELOAD" not in added
    pid = os.fork()
    if pid:
        return Process(pid=pid, folder=folder, mark=mark, own=command.own)
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name, number in (("stdout", 1), ("stderr", 2)):
            descriptor = os.open(output_file(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(added)
        before()
        if not is_forked:
            os.execvp((line := [*prefix, sys.executable, "-m", command.module, *arguments, "--json"])[0], line)
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from recmill.cli import main

        main([*arguments, "--json"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: what an interpreter would print
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(Exception):
        import logging

        logging.shutdown()
    os._exit(code)


def survivors(process: Process) -> list[psutil.Process]:
    """Processes of a case that still run: by the environment they were started with, or the session they are in."""
    found = []
    for other in psutil.process_iter(["pid"]):
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = os.getsid(other.pid) == process.pid or other.environ().get(MARK) == process.mark
            if is_ours and other.status() != psutil.STATUS_ZOMBIE:
                found.append(other)
    return found
