"""The age of a process is the time since it was started."""

import subprocess
import sys
import time

from recmill.progress import seconds_since_start

TICK_S = 0.01


def test_a_process_is_as_old_as_the_time_since_its_start():
    code = "from recmill.progress import seconds_since_start as age; print(age(), flush=True); input()"
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        own = float(process.stdout.readline())
        seen = seconds_since_start(process.pid)
        elapsed = time.monotonic() - before
        process.stdin.close()
    assert 0 < own <= seen <= elapsed + 2 * TICK_S
