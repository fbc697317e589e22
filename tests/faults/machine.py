"""What faults need of the machine: small file systems and control groups. As root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def run_tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    run_tool("mount", "-t", "tmpfs", "-o", options, "recmill-faults", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def memory_controller() -> Path | None:
    for root, limit in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        if os.access(root, os.W_OK) and (root / limit.replace("memory.max", "cgroup.controllers")).exists():
            return root
    return None


@contextmanager
def control_group(name: str, limit: int | None = None) -> Iterator[Callable[[], None]]:
    """A memory control group of version 1 or 2; gives the function by which a process joins it."""
    root = memory_controller()
    assert root is not None
    group, is_old = root / name, (root / "memory.limit_in_bytes").exists()
    group.mkdir()
    try:
        if limit is not None:
            (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def peak_bytes(name: str) -> int:
    root = memory_controller()
    assert root is not None
    for file in ("memory.max_usage_in_bytes", "memory.peak"):
        if (root / name / file).exists():
            return int((root / name / file).read_text())
    return 0
