"""A process that loads TorchRec once and forks: the trainings of a run start at once, one after the other.

    recmill run             ── starts ──>  server: loads what ranks import, then waits at a Unix socket
      step train_baseline   ── asks ────>    fork: TorchRec's planner
                            ── asks ────>    fork: the agent  ──>  forks: its ranks
      step train_model      ── asks ────>    fork: the agent  ──>  forks: its ranks

A fork calls `main` of the module that it is asked for, as `python -m MODULE` does. It gets the asking process's
environment, folder and output. It is killed when that process or the server ends, and the server dies with the process
that started it. Whoever asks too early waits; the wait counts as start-up.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from recmill.artifacts import held_folder
from recmill.training.agent import forks_ranks, load_worker
from recmill.training.processes import die_with_parent, rank_environment

FOLDER = "RECMILL_PRELOADED"  # environment variable: the folder of the server's socket
LENGTH = struct.Struct("!I")  # a request: its length, its JSON
# Libraries read such variables when they are loaded: a fork cannot change them any more.
READ_ON_LOADING = (
    *("ARROW", "CUDA", "GLIBC", "GOMP", "KMP", "LD_", "MALLOC", "MIMALLOC", "MKL", "OMP", "OPENBLAS"),
    *("PYTHON", "PYTORCH", "TORCH"),
)


@contextmanager
def preloaded_ranks(threads: int) -> Iterator[None]:
    """While the block runs, trainings of this process and of its children with so many threads per rank are forked."""
    if FOLDER in os.environ or not forks_ranks():
        yield
        return
    with forking_server([sys.executable, "-m", "recmill.training.preload"], rank_environment(threads)):
        yield


@contextmanager
def forking_server(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server that `command` runs, given the descriptor of its socket, while the block runs."""
    with held_folder(purpose="preload") as scratch:
        folder = str(scratch)
        # The socket exists before the server does: requests wait in its queue, and are refused once the server is gone.
        with socket.socket(socket.AF_UNIX) as listener:
            with _short_path(_address(folder, environment)) as path:
                listener.bind(path)
            listener.listen()
            server = subprocess.Popen(
                [*command, str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[listener.fileno()],
                preexec_fn=die_with_parent,
            )
        os.environ[FOLDER] = folder
        try:
            yield server
        finally:
            del os.environ[FOLDER]
            server.kill()
            server.wait()


class Fork:
    """A fork of the server, with what is needed of the interface of subprocess.Popen."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str]) -> None:
        self._connection, self.pid, self.stdout = connection, pid, stdout
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _watch(self) -> None:
        reply = ""
        with self._connection, self._connection.makefile("r", encoding="utf-8") as replies, suppress(OSError):
            reply = replies.readline()
        # Without a reply the server is gone, and the fork with it.
        self.returncode = int(reply) if reply else -signal.SIGKILL
        self._ended.set()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_module(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], stderr: IO[str]
) -> subprocess.Popen[str] | Fork:
    """`python -m module` with these arguments, as a fork of a process that has loaded TorchRec if there is one."""
    if forked := fork_module(module, arguments, environment=environment, stderr=stderr):
        return forked
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        preexec_fn=die_with_parent,
    )


def fork_module(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], stderr: IO[str]
) -> Fork | None:
    """A fork of the server that runs the module; None if there is no server with this environment."""
    folder = os.environ.get(FOLDER)
    if not folder or not (address := _address(folder, environment)).exists():
        return None
    request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
    body = json.dumps(request | {"folder": os.getcwd()}).encode()
    reading, writing = os.pipe()
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(address) as path:
            connection.connect(path)
        socket.send_fds(connection, [LENGTH.pack(len(body))], [writing, stderr.fileno()])
        connection.sendall(body)
        pid = connection.recv(LENGTH.size, socket.MSG_WAITALL)  # once the server has loaded everything
    except OSError:
        pid = b""
    finally:
        os.close(writing)
    if len(pid) < LENGTH.size:  # the server has failed; what failed there says why in a process of its own
        os.close(reading)
        connection.close()
        return None
    return Fork(connection, LENGTH.unpack(pid)[0], os.fdopen(reading, encoding="utf-8"))


def _address(folder: str, environment: Mapping[str, str]) -> Path:
    """The socket of the server whose libraries were loaded under the same variables."""
    read = sorted(item for item in environment.items() if item[0].startswith(READ_ON_LOADING))
    return Path(folder, hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16])


@contextmanager
def _short_path(address: Path) -> Iterator[str]:
    """Another path of a socket, through its open folder: a path of 108 bytes is too long for one."""
    folder = os.open(address.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


def serve(listener: socket.socket, *, load: Callable[[], str] = load_worker) -> None:
    """Load what ranks import, then fork per request, until this process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the steps; this process ends with the run
    if not load():
        return  # ranks cannot be forked here
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    requesters: dict[int, socket.socket] = {}
    while True:
        for key, _ in watched.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                if (pid := _answer(connection, others=[listener, *requesters.values()])) is None:
                    connection.close()
                    continue
                requesters[pid] = connection
                watched.register(connection, selectors.EVENT_READ, pid)
                watched.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif isinstance(key.fileobj, socket.socket):  # nobody sends a second message: the requester is gone
                watched.unregister(key.fileobj)
                with suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
            else:
                watched.unregister(key.fileobj)
                os.close(key.fd)
                connection = requesters.pop(key.data)
                with suppress(KeyError):
                    watched.unregister(connection)
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                with suppress(OSError), connection:
                    connection.sendall(f"{code}\n".encode())


def _answer(connection: socket.socket, *, others: Sequence[socket.socket]) -> int | None:
    """The process id of the fork that a request asks for; None if the requester is gone."""
    try:
        header, outputs, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
        body = connection.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL)
        request = json.loads(body)
    except (OSError, struct.error, ValueError):
        return None
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        _run_fork(request, outputs, server=server, close=[connection, *others])
    for descriptor in outputs:
        os.close(descriptor)
    with suppress(OSError):
        connection.sendall(LENGTH.pack(pid))
    return pid


def _run_fork(
    request: Mapping[str, Any], outputs: Sequence[int], *, server: int, close: Sequence[socket.socket]
) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        if os.getppid() != server:
            os._exit(code)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for connection in close:
            connection.close()
        for number, descriptor in enumerate(outputs, start=1):  # standard output and standard error
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        importlib.import_module(request["module"]).main(request["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: what an interpreter would print
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
