"""The number of cores available to a process."""

from __future__ import annotations

import os
from pathlib import Path

from recmill.data.ingest.memory import control_groups


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its CPU affinity or, if smaller, the quota of one of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for folder in control_groups(cgroup_root):
        quota_file = folder / "cpu.max"
        quota, period = quota_file.read_text(encoding="utf-8").split() if quota_file.is_file() else ("max", "1")
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)
