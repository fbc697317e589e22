"""What ranks used: CPU seconds, memory, bytes sent over the network."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch.distributed as dist

from recmill.model.stores.collectives import gather_json

COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace; /sys shows that of its mount
SENT_BYTES = 8  # column
LOOPBACK = "lo"


def sent_bytes() -> dict[str, int]:
    """Bytes sent so far per network interface; only the interfaces that gloo or NCCL were told to use, if any."""
    try:
        lines = COUNTERS.read_text(encoding="ascii").splitlines()[2:]
    except OSError:  # not Linux
        return {}
    fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    chosen = {*named.split(","), LOOPBACK} if named else set(fields)
    return {name: int(values[SENT_BYTES]) for name, values in fields.items() if name in chosen}


class UsageMeter:
    """Adds up what this process used while the meter ran: training without evaluation and checkpoints.

    Bytes are those of the process's network namespace: sent over loopback, and sent to others.
    """

    def __init__(self) -> None:
        self.used = {"cpu_seconds": 0.0, "loopback_bytes": 0, "outside_bytes": 0}
        self.startup_seconds = 0.0  # from the start of torchrun until the imports of this rank were done
        self._since: dict[str, float] | None = None

    def start(self) -> None:
        self._since = _counters()

    def stop(self) -> None:
        if self._since is not None:
            now = _counters()
            self.used = {name: used + now[name] - self._since[name] for name, used in self.used.items()}
            self._since = None


def _counters() -> dict[str, float]:
    process, sent = resource.getrusage(resource.RUSAGE_SELF), sent_bytes()
    loopback = sent.pop(LOOPBACK, 0)
    cpu_seconds = process.ru_utime + process.ru_stime
    return {"cpu_seconds": cpu_seconds, "loopback_bytes": loopback, "outside_bytes": sum(sent.values())}


def usage_of_all_ranks(meter: UsageMeter) -> dict[str, float]:
    """The meters of all ranks together, the same on every rank: CPU seconds, wire bytes, the largest rank's memory.

    Ranks in one network namespace see one another's bytes, so a namespace is counted once: by what it sent to others,
    or by its loopback if all ranks are in it.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ranks = gather_json([_namespace(), peak, {**meter.used, "startup_seconds": meter.startup_seconds}])
    networks = {network: used for network, _, used in ranks}
    counted = "loopback_bytes" if len(networks) == 1 else "outside_bytes"
    return {
        "cpu_seconds": sum(used["cpu_seconds"] for _, _, used in ranks),
        "wire_bytes": sum(used[counted] for used in networks.values()),
        "startup_seconds": max(used["startup_seconds"] for _, _, used in ranks),
        "peak_memory_bytes": max(rank_peak for _, rank_peak, _ in ranks),
    }


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net") + os.uname().nodename
    except OSError:
        return f"{os.uname().nodename}/{dist.get_rank()}"
