"""Reports processes that the kernel killed at the pod's memory limit: they cannot report it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recmill.sizes import format_bytes
from recmill.training.trainer import TrainingFailed

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def explain_memory_limit(root: Path = ROOT) -> Iterator[None]:
    """Name the memory limit as the cause if the kernel killed a process of this container meanwhile."""
    before = num_kills(root)
    try:
        yield
    except TrainingFailed as error:
        if num_kills(root) <= before:
            raise
        raise TrainingFailed(
            f"a process was killed at the pod's memory limit of {describe_limit(root)}; give the step more memory in "
            f"the placement, use more nodes, or lower batch_size ({error})"
        ) from error


def num_kills(root: Path = ROOT) -> int:
    """How many processes of this container the kernel killed at the memory limit; 0 where this is unknown."""
    for file in ("memory.events", "memory/memory.oom_control"):  # cgroup v2, v1
        try:
            lines = (root / file).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = dict(line.split() for line in lines)
        return int(counts.get("oom_kill", 0))
    return 0


def describe_limit(root: Path = ROOT) -> str:
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return format_bytes(int(text)) if text.isdigit() else "the node"
    return "unknown size"
