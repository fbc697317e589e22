"""The cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores this process may use: its CPU affinity, or the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota_file = cgroup_root / "cpu.max"
    quota, period = quota_file.read_text(encoding="utf-8").split() if quota_file.is_file() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
