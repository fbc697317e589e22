"""Processes that somebody has stopped: a launcher ends them after the time limit, and says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from recmill.training.processes import ending_stopped

# A process below a process: only the lower one is stopped.
TREE = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"


def test_a_process_that_is_stopped_for_good_is_ended_with_a_reason() -> None:
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as upper:
        assert upper.stdout is not None
        lower = int(upper.stdout.readline())
        with ending_stopped(0.4) as said:
            os.kill(lower, signal.SIGSTOP)
            assert upper.wait(timeout=60) == 0  # whoever waited for it goes on
        assert said == [f"process {lower} was stopped (SIGSTOP) for 0.4 s"]


def test_a_process_that_goes_on_in_time_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process, ending_stopped(2.0) as said:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        process.send_signal(signal.SIGCONT)
        time.sleep(2.0)
        assert process.poll() is None
        assert said == []
        process.kill()
