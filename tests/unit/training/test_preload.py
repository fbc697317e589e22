"""The server that forks agents: a fork is a process like one that the asking process would have started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from recmill.training.preload import FOLDER, Fork, fork_module, forking_server, preloaded_ranks

# A server that has nothing to load; its forks are asked to run the same file.
SERVER = """
import os, socket, sys, time
from recmill.training.preload import serve

def main(arguments):
    what, *rest = arguments
    if what == "show":
        print(os.environ["SHOWN"], os.getcwd())
        print("to the log", file=sys.stderr)
    elif what == "exit":
        sys.exit(int(rest[0]))
    elif what == "fail":
        raise RuntimeError("on purpose")
    elif what == "sleep":
        print("sleeping", flush=True)
        time.sleep(60)

serve(socket.socket(fileno=int(sys.argv[1])), load=lambda: "loaded")
"""
ASKER = """
import os, sys
from recmill.training.preload import fork_module

forked = fork_module("__main__", ["sleep"], environment=os.environ, stderr=sys.stderr)
print(forked.pid, flush=True)
forked.wait()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[bytes]]:
    with forking_server([sys.executable, "-c", SERVER], os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        yield process


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TextIO]:
    with open(tmp_path / "log", "w+", encoding="utf-8") as file:
        yield file


def ask(log: TextIO, *arguments: str, **variables: str) -> Fork:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    forked = fork_module("__main__", arguments, environment=environment, stderr=log)
    assert forked is not None
    return forked


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_fork_has_the_environment_the_folder_and_the_output_of_who_asked(server, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forked = ask(log, "show", SHOWN="this")
    assert forked.stdout.read() == f"this {tmp_path}\n"
    assert forked.wait() == 0
    log.seek(0)
    assert log.read() == "to the log\n"


def test_a_fork_ends_as_a_process_would(server, log):
    assert ask(log, "exit", "0").wait() == 0
    assert ask(log, "exit", "3").wait() == 3
    assert ask(log, "fail").wait() == 1
    log.seek(0)
    assert log.read().rstrip().endswith("RuntimeError: on purpose")


def test_a_fork_takes_signals(server, log):
    forked = ask(log, "sleep")
    assert forked.stdout.readline() == "sleeping\n"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(timeout=0.01)
    forked.send_signal(signal.SIGTERM)
    assert forked.wait(timeout=20) == -signal.SIGTERM


def test_a_fork_is_killed_with_the_process_that_asked(server, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    asker = subprocess.Popen([sys.executable, "-c", ASKER], stdout=subprocess.PIPE, text=True, env=environment)
    assert asker.stdout is not None
    pid = int(asker.stdout.readline())
    assert psutil.pid_exists(pid)
    asker.kill()
    asker.communicate()
    assert ends(pid)
    assert server.poll() is None


def test_forks_run_side_by_side(server, log):
    slow, quick = ask(log, "sleep"), ask(log, "exit", "0")
    assert quick.wait(timeout=20) == 0
    assert slow.returncode is None
    slow.send_signal(signal.SIGKILL)
    assert slow.wait(timeout=20) == -signal.SIGKILL


def test_variables_that_libraries_read_when_loaded_need_a_server_of_their_own(server, log):
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    assert fork_module("__main__", ["exit", "0"], environment=environment, stderr=log) is None


def test_a_fork_is_killed_with_the_server_and_later_requests_get_none(log, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with forking_server([sys.executable, "-c", SERVER], os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        forked = ask(log, "sleep")
        process.kill()
        assert forked.wait(timeout=20) == -signal.SIGKILL
        assert ends(forked.pid)
        assert (
            fork_module("__main__", ["exit", "0"], environment=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log)
            is None
        )


def test_without_forked_ranks_there_is_no_server(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("RECMILL_FORKED_RANKS", "off")
    with preloaded_ranks(1):
        assert FOLDER not in os.environ


def test_a_temporary_folder_may_have_a_long_path(log, tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 40)  # the path of a socket has at most 107 bytes
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv(FOLDER, raising=False)
    with forking_server([sys.executable, "-c", SERVER], os.environ | {"OMP_NUM_THREADS": "1"}):
        assert os.environ[FOLDER].startswith(str(folder))
        assert ask(log, "exit", "3").wait(60) == 3
