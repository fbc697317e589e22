"""The parent of several workers, with small programmes in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISOR = """
import sys
from recmill.artifacts import InputError
from recmill.serving.server.settings import ServerSettings
from recmill.serving.server.workers import shared_metrics, supervise

settings = ServerSettings(model="", workers=2, grace_s=1)
try:
    with shared_metrics():
        sys.exit(supervise(settings, [sys.executable, "-c", sys.argv[1]]))
except InputError as error:
    sys.exit(f"recmill: error: {error}")
"""
WORKER = """
import os, pathlib, signal, sys, time
from recmill.serving.server.settings import ServerSettings
from recmill.serving.server.workers import METRICS_VARIABLE, tell_parent

settings = ServerSettings.from_argument(sys.argv[1])
number, folder = settings.worker, pathlib.Path(os.environ["FOLDER"])

def note(name):
    with open(folder / f"{name}-{number}", "a") as file:
        print(os.getpid(), os.environ[METRICS_VARIABLE], file=file)
"""
SERVES = 'tell_parent(settings); note("serves"); time.sleep(60)\n'


def supervisor(folder: Path, worker: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, WORKER + worker]
    environment = {**os.environ, "FOLDER": str(folder), "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def noted(path: Path, lines: int = 1) -> list[tuple[int, Path]]:
    """What workers have noted: their process and the folder of their metrics."""
    deadline_s = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline_s, path
        time.sleep(0.02)
    found = [line.split(" ", 1) for line in path.read_text().splitlines()]
    return [(int(pid), Path(place)) for pid, place in found]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_lost_worker_is_started_again_and_its_gauges_vanish(tmp_path: Path) -> None:
    parent = supervisor(tmp_path, SERVES)
    ((first, metrics),) = noted(tmp_path / "serves-0")
    names = {f"gauge_livemax_{first}.db", f"gauge_livesum_{first}.db", f"counter_{first}.db"}
    for name in names:
        (metrics / name).touch()
    os.kill(first, signal.SIGKILL)
    assert noted(tmp_path / "serves-0", lines=2)[1][0] != first
    assert [path.name for path in metrics.iterdir()] == [f"counter_{first}.db"]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 0
    assert not metrics.exists()


def test_workers_end_with_their_killed_parent_and_the_next_one_removes_its_folder(tmp_path: Path) -> None:
    parent = supervisor(tmp_path, SERVES)
    workers = [noted(tmp_path / f"serves-{number}")[0] for number in (0, 1)]
    parent.kill()
    parent.wait(10)
    deadline_s = time.monotonic() + 30
    while not all(has_ended(pid) for pid, _ in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    again = supervisor(tmp_path, SERVES)
    (_, metrics) = noted(tmp_path / "serves-0", lines=2)[1]
    assert metrics != workers[0][1]
    assert not workers[0][1].exists()
    again.send_signal(signal.SIGTERM)
    assert again.wait(30) == 0


def test_a_worker_whose_parent_is_gone_before_it_starts_ends(tmp_path: Path) -> None:
    from recmill.serving.server.workers import die_with_parent

    started = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=lambda: die_with_parent(1)
    )
    assert started.wait(30) != 0


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL (too little memory?)"),
        ("sys.exit(7)", "exit code 7"),
        ('tell_parent(settings, "no model"); sys.exit(2)', "recmill: error: no model"),
        ('if number: tell_parent(settings, "no model"); sys.exit(2)\ntime.sleep(60)', "recmill: error: no model"),
    ],
)
def test_a_server_whose_workers_never_serve_ends_with_one_sentence(tmp_path: Path, worker: str, sentence: str) -> None:
    parent = supervisor(tmp_path, worker)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert said.count("recmill: error") == 1
    assert sentence in said.splitlines()[-1]


def test_a_worker_that_cannot_start_again_leaves_the_other_one_serving(tmp_path: Path) -> None:
    broken = 'if number and (folder / "broken").exists(): note("fails"); tell_parent(settings, "broken"); sys.exit(2)\n'
    parent = supervisor(tmp_path, broken + SERVES)
    ((first, _),) = noted(tmp_path / "serves-1")
    noted(tmp_path / "serves-0")
    (tmp_path / "broken").touch()
    os.kill(first, signal.SIGKILL)
    noted(tmp_path / "fails-1", lines=2)
    assert parent.poll() is None
    (tmp_path / "broken").unlink()
    noted(tmp_path / "serves-1", lines=2)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 0
