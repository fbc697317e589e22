"""Ranks whose launcher was killed: they do not keep the training waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from recmill.training import processes

RANK = "import sys, time; time.sleep(60)"
LAUNCHER = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {RANK!r}, sys.argv[1]]); os._exit(9)"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_rank_that_outlives_its_launcher_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ORPHAN_WAIT_S", 0.2)
    job = str(tmp_path / "job.json")
    started = time.monotonic()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, job], stdout=subprocess.PIPE, text=True)
    with processes.ending_orphans(launcher, job):
        assert launcher.stdout is not None
        assert launcher.stdout.read() == ""  # ends when nobody holds the output open any more
    assert launcher.wait() == 9
    assert time.monotonic() - started < 50
