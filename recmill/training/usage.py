"""What a rank used up: CPU seconds, memory, bytes on the wire."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

LOOPBACK = "lo"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counters of this process (and, for the wire, of its network namespace) at one moment."""

    cpu_seconds: float
    wire_bytes: int

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(cpu_seconds=used.ru_utime + used.ru_stime, wire_bytes=sent_bytes(network_interface()))


def network_interface() -> str:
    """The interface ranks talk over: what gloo or NCCL was told, otherwise loopback (one machine)."""
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or LOOPBACK
    return named.split(",")[0]


def sent_bytes(interface: str) -> int:
    """Bytes the interface has sent so far; 0 where the system does not say."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    try:
        return int(counter.read_text(encoding="ascii"))
    except OSError:
        return 0


class Meter:
    """Adds up what training used, leaving out evaluation and saving."""

    def __init__(self) -> None:
        self.cpu_seconds, self.wire_bytes = 0.0, 0
        self._since: Usage | None = None

    def start(self) -> None:
        self._since = Usage.now()

    def stop(self) -> None:
        if self._since:
            now = Usage.now()
            self.cpu_seconds += now.cpu_seconds - self._since.cpu_seconds
            self.wire_bytes += now.wire_bytes - self._since.wire_bytes
            self._since = None


@dataclass(frozen=True, kw_only=True)
class _RankUsage:
    cpu_seconds: float
    wire_bytes: int
    peak_memory_bytes: int
    network: str


def usage_of_all_ranks(meter: Meter) -> dict[str, float]:
    """What all ranks used by the meter, the same on every rank: CPU seconds, wire bytes, the largest rank's memory.

    Ranks in one network namespace see one another's bytes, so a namespace is counted once.
    """
    own = _RankUsage(
        cpu_seconds=meter.cpu_seconds,
        wire_bytes=meter.wire_bytes,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        network=_namespace(),
    )
    ranks: list[_RankUsage] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {
        "cpu_seconds": sum(rank.cpu_seconds for rank in ranks),
        "wire_bytes": sum({rank.network: rank.wire_bytes for rank in ranks}.values()),
        "peak_memory_bytes": max(rank.peak_memory_bytes for rank in ranks),
    }


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net") + os.uname().nodename
    except OSError:
        return f"{os.uname().nodename}/{dist.get_rank()}"
