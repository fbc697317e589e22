"""The process that the ranks of shaped_network.py fork from: `forked_ranks.py JOB.json`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def fork_ranks(job_path: Path) -> None:
    """The process that ranks fork from: import once, then one child per rank, each in its namespace."""
    _die_with_parent()
    job = json.loads(job_path.read_text(encoding="utf-8"))
    sys.path.insert(0, str(Path(job["command"][0]).parent))
    for module in job["preload"]:
        importlib.import_module(module)
    ranks: dict[int, int] = {}
    for rank, entry in enumerate(job["ranks"]):
        process = os.fork()
        if process == 0:
            _be_rank(entry, job["command"])
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if status:
            (job_path.parent / "failed.json").write_text(json.dumps(rank), encoding="utf-8")
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _be_rank(entry: Mapping[str, Any], command: Sequence[str]) -> None:
    """Run the script as this rank and exit: nothing of the parent process may run again."""
    _die_with_parent()
    log = os.open(entry["log"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code: Any = 1
    try:
        if entry["namespace"]:
            _enter(entry["namespace"])
        os.environ.update(entry["environment"])
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _enter(namespace: str) -> None:
    with open(namespace, "rb") as opened:
        of_network = 0x40000000  # CLONE_NEWNET of setns(2); os.setns exists from Python 3.12
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(opened.fileno(), of_network):
            raise OSError(ctypes.get_errno(), f"setns into {namespace}")


def _die_with_parent() -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]))
