"""What a rank used up: CPU seconds, memory, bytes on the wire."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace; /sys shows that of its mount
SENT_BYTES = 8  # column
LOOPBACK = "lo"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counters of this process, and for the wire of its network namespace, at one moment."""

    cpu_seconds: float
    loopback_bytes: int
    outside_bytes: int

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        sent = sent_bytes()
        loopback = sent.pop(LOOPBACK, 0)
        outside = sum(sent.values())
        return cls(cpu_seconds=used.ru_utime + used.ru_stime, loopback_bytes=loopback, outside_bytes=outside)


def sent_bytes() -> dict[str, int]:
    """Bytes every network interface has sent so far; those that gloo or NCCL were told to use, if they were."""
    try:
        lines = COUNTERS.read_text(encoding="ascii").splitlines()[2:]
    except OSError:  # a system that does not say
        return {}
    fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    chosen = {*named.split(","), LOOPBACK} if named else set(fields)
    return {name: int(values[SENT_BYTES]) for name, values in fields.items() if name in chosen}


class UsageMeter:
    """Adds up what training used, leaving out evaluation and saving."""

    def __init__(self) -> None:
        self.cpu_seconds, self.loopback_bytes, self.outside_bytes = 0.0, 0, 0
        self._since: Usage | None = None

    def start(self) -> None:
        self._since = Usage.now()

    def stop(self) -> None:
        if self._since:
            now = Usage.now()
            self.cpu_seconds += now.cpu_seconds - self._since.cpu_seconds
            self.loopback_bytes += now.loopback_bytes - self._since.loopback_bytes
            self.outside_bytes += now.outside_bytes - self._since.outside_bytes
            self._since = None


@dataclass(frozen=True, kw_only=True)
class _RankUsage:
    cpu_seconds: float
    loopback_bytes: int
    outside_bytes: int
    peak_memory_bytes: int
    network: str


def usage_of_all_ranks(meter: UsageMeter) -> dict[str, float]:
    """What all ranks used by the meter, the same on every rank: CPU seconds, wire bytes, the largest rank's memory.

    Ranks in one network namespace see one another's bytes, so a namespace is counted once: by what it sent to others,
    or by its loopback where all ranks are in it.
    """
    own = _RankUsage(
        cpu_seconds=meter.cpu_seconds,
        loopback_bytes=meter.loopback_bytes,
        outside_bytes=meter.outside_bytes,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        network=_namespace(),
    )
    ranks: list[_RankUsage] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    networks = {rank.network: rank for rank in ranks}
    is_one = len(networks) == 1
    return {
        "cpu_seconds": sum(rank.cpu_seconds for rank in ranks),
        "wire_bytes": sum(rank.loopback_bytes if is_one else rank.outside_bytes for rank in networks.values()),
        "peak_memory_bytes": max(rank.peak_memory_bytes for rank in ranks),
    }


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net") + os.uname().nodename
    except OSError:
        return f"{os.uname().nodename}/{dist.get_rank()}"
