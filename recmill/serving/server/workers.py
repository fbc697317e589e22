"""Several workers on one port: a parent that starts them, starts lost ones again, and stops them together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

from recmill.serving.server.settings import ServerSettings

RESTART_S = 1.0  # between two starts of a worker
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

logger = logging.getLogger("recmill.serve")


def share_metrics() -> None:
    """A folder in which the workers put their counts, so that any of them can show all."""
    if METRICS_VARIABLE not in os.environ:
        os.environ[METRICS_VARIABLE] = tempfile.mkdtemp(prefix="recmill-serve-")


def supervise(settings: ServerSettings, command: Sequence[str]) -> int:
    """Run the workers until SIGTERM or SIGINT; a worker that cannot start (exit code 2) ends all of them."""
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def start(worker: int) -> subprocess.Popen[bytes]:
        argument = replace(settings, worker=worker).to_argument()
        return subprocess.Popen([*command, argument], preexec_fn=_die_with_parent)

    running = {worker: (start(worker), time.monotonic()) for worker in range(settings.workers)}
    code = 0
    while not stopping:
        time.sleep(LOOK_S)
        for worker, (process, began_s) in running.items():
            ended = process.poll()
            if ended is None or time.monotonic() - began_s < RESTART_S:
                continue
            if ended == 2:
                stopping, code = True, 2
                break
            logger.warning("worker %d ended with %d: starting it again", worker, ended)
            running[worker] = (start(worker), time.monotonic())
    for process, _ in running.values():
        if process.poll() is None:
            process.terminate()
    deadline_s = time.monotonic() + settings.drain_s + settings.grace_s + 5
    for process, _ in running.values():
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
