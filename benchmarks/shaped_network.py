"""Ranks as real processes on a network with a slow link between nodes, and the bytes that crossed it.

    core ----- slow, inter_mbit each way ----- node 0 bridge --- rank 0 (eth0)
      |                                              \\---------- rank 1 (eth0)     intra_mbit each way
      +------- slow, inter_mbit each way ----- node 1 bridge --- rank 2 (eth0) ...

Every rank, node and the core is a network namespace, joined by veth pairs and bridges, shaped with `tc tbf`. This needs
root and iproute2; without them the same processes run over the loopback interface, and the result says so.
A rank's script finds torch.distributed's variables set, returns JSON through `write_result`, and reads the bytes on
the wire with `read_counters`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "recmill"
NAMESPACES = Path("/var/run/netns")
RESULT_PATH = "RECMILL_RANK_RESULT"
NODE_PROCESS = "RECMILL_NODE_PROCESS"  # a process inside the namespace of this rank's node
# What a link that was idle sends at once must be small against a step's bytes: it costs no time. 256 KiB, a burst above
# the kernel's segments of 64 KiB, let 200 kB cross a link of 100 Mbit/s in 0.4 ms instead of 16.
SEGMENT_BYTES = 32 * 1024
BURST_BYTES = 40 * 1024  # above one segment, which tbf would otherwise have to split
BURST_S = 0.5e-3  # at high rates: above the time that a busy machine takes to wake up the queue


class NetworkUnavailable(RuntimeError):
    """Namespaces cannot be created; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Number of ranks and speed of the links; None leaves a link unshaped."""

    nodes: int
    ranks_per_node: int
    inter_mbit: float | None
    intra_mbit: float | None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def run_on_nodes(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    nodes: int,
    ranks_per_node: int,
    inter_mbit: float | None,
    intra_mbit: float | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    silence_s: float = 900.0,
) -> dict[str, Any]:
    """Run `script` once per rank and return what the ranks wrote.

    Ranks that print nothing for `silence_s` are hung: a long script prints a line after each piece of its work.

    Ranks fork from one process that has imported the modules of `preload`: eight times torch takes 25 s on two cores.

    `network` is "namespaces" or "loopback", `note` says why it is not the former; `results` holds the ranks' JSON in
    order; `rank_bytes` and `node_bytes` are the interface counters of the whole run, {"sent", "received"} each (None
    on loopback).
    """
    shape = Shape(nodes=nodes, ranks_per_node=ranks_per_node, inter_mbit=inter_mbit, intra_mbit=intra_mbit)
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(_clean_up_when_terminated())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recmill-ranks-")))
        try:
            network: _Network | None = stack.enter_context(_namespaces(shape))
            note = ""
        except NetworkUnavailable as error:
            network, note = None, f"no shaped network: {error}; the ranks talk over loopback at full speed"
        job = {"preload": list(preload), "command": [str(script), *args], "ranks": _ranks(shape, network, scratch)}
        results = _run_ranks(job, env or {}, scratch, silence_s)
        return {
            "network": "loopback" if network is None else "namespaces",
            "note": note,
            "results": results,
            "rank_bytes": None if network is None else [network.rank_bytes(rank) for rank in range(shape.world_size)],
            "node_bytes": None if network is None else [network.node_bytes(node) for node in range(nodes)],
            "seconds": time.perf_counter() - started,
        }


def write_result(value: Any) -> None:
    """Return `value` (JSON) to `run_on_nodes` from inside a rank."""
    Path(os.environ[RESULT_PATH]).write_text(json.dumps(value), encoding="utf-8")


def read_counters() -> dict[str, int] | None:
    """Bytes so far, seen from inside a rank; None on loopback, where ranks cannot be distinguished.

    `sent` and `received` passed this rank's interface, `node_sent` and `node_received` its node's slow link.
    """
    if NODE_PROCESS not in os.environ:
        return None
    own = _read_interface("self", "eth0")
    node = _read_interface(os.environ[NODE_PROCESS], "uplink")
    return {
        "sent": own["sent"],
        "received": own["received"],
        "node_sent": node["sent"],
        "node_received": node["received"],
    }


def _read_interface(process: str, interface: str) -> dict[str, int]:
    # /proc/PID/net belongs to the namespace of that process: reading another one needs no `ip netns exec`.
    for line in Path(f"/proc/{process}/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return {"received": int(columns[0]), "sent": int(columns[8])}
    raise RuntimeError(f"/proc/{process}/net/dev: no interface {interface}")


@dataclass(frozen=True, kw_only=True)
class _Network:
    """The namespaces of a run, with one idle process in each."""

    prefix: str
    ranks_per_node: int
    holders: dict[str, int]  # namespace -> process id

    def rank_namespace(self, rank: int) -> str:
        return f"{self.prefix}-rank{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.{rank // self.ranks_per_node}.{rank % self.ranks_per_node + 1}"

    def node_process(self, rank: int) -> int:
        return self.holders[f"{self.prefix}-node{rank // self.ranks_per_node}"]

    def rank_bytes(self, rank: int) -> dict[str, int]:
        return _read_interface(str(self.holders[self.rank_namespace(rank)]), "eth0")

    def node_bytes(self, node: int) -> dict[str, int]:
        return _read_interface(str(self.holders[f"{self.prefix}-node{node}"]), "uplink")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


def _shape_link(namespace: str, interface: str, mbit: float | None) -> None:
    if mbit is None:
        return
    burst = max(BURST_BYTES, int(mbit * 1e6 / 8 * BURST_S))
    rate = ["rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "200ms"]
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(f"tc on {interface}: {done.stderr.strip() or done.returncode}")


@contextmanager
def _namespaces(shape: Shape) -> Iterator[_Network]:
    """The network of `shape`; removed by name afterwards in any case."""
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetworkUnavailable(f"{tool} is missing (iproute2)")
    _remove_leftovers()
    prefix = f"{PREFIX}-{os.getpid()}"
    names = [f"{prefix}-core", *(f"{prefix}-node{node}" for node in range(shape.nodes))]
    names += [f"{prefix}-rank{rank}" for rank in range(shape.world_size)]
    holders: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _join(prefix, shape)
        for name in names:
            holders[name] = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "infinity"])
        yield _Network(
            prefix=prefix,
            ranks_per_node=shape.ranks_per_node,
            holders={name: process.pid for name, process in holders.items()},
        )
    finally:
        for process in holders.values():
            process.kill()
            process.wait()
        _remove_namespaces(names)


def _join(prefix: str, shape: Shape) -> None:
    core = f"{prefix}-core"
    for bridged in (core, *(f"{prefix}-node{node}" for node in range(shape.nodes))):
        _ip("-n", bridged, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", bridged, "link", "set", "bridge0", "up")
    for node in range(shape.nodes):
        inside = f"{prefix}-node{node}"
        _connect(core, f"node{node}", inside, "uplink", shape.inter_mbit)
        _ip("-n", inside, "link", "set", "uplink", "master", "bridge0")
    for rank in range(shape.world_size):
        inside = f"{prefix}-rank{rank}"
        node = rank // shape.ranks_per_node
        _connect(f"{prefix}-node{node}", f"rank{rank}", inside, "eth0", shape.intra_mbit)
        address = f"10.77.{node}.{rank % shape.ranks_per_node + 1}/16"
        _ip("-n", inside, "addr", "add", address, "dev", "eth0")


def _connect(outer: str, outer_name: str, inner: str, inner_name: str, mbit: float | None) -> None:
    """A veth pair from the bridge of `outer` into `inner`, shaped both ways."""
    _ip("-n", outer, "link", "add", outer_name, "type", "veth", "peer", "name", inner_name, "netns", inner)
    _ip("-n", outer, "link", "set", outer_name, "gso_max_size", str(SEGMENT_BYTES), "master", "bridge0", "up")
    _ip("-n", inner, "link", "set", inner_name, "gso_max_size", str(SEGMENT_BYTES), "up")
    _shape_link(outer, outer_name, mbit)
    _shape_link(inner, inner_name, mbit)


def _remove_namespaces(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Remove namespaces of runs that were killed before they could clean up, with their processes."""
    for path in NAMESPACES.glob(f"{PREFIX}-*") if NAMESPACES.exists() else ():
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            inside = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False)
            for process in inside.stdout.split():
                os.kill(int(process), signal.SIGKILL)
            _remove_namespaces([path.name])


@contextmanager
def _clean_up_when_terminated() -> Iterator[None]:
    """Let SIGTERM (a time limit, a supervisor) unwind the stack, so that no namespace is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks(shape: Shape, network: _Network | None, scratch: Path) -> list[dict[str, Any]]:
    """What each rank needs to start: its namespace, variables and output file."""
    port = 29_400 if network else _free_port()
    return [
        {
            "namespace": str(NAMESPACES / network.rank_namespace(rank)) if network else None,
            "environment": _rank_environment(shape, network, rank, port, scratch / f"result-{rank}.json"),
            "log": str(scratch / f"log-{rank}.txt"),
        }
        for rank in range(shape.world_size)
    ]


def _run_ranks(job: Mapping[str, Any], env: Mapping[str, str], scratch: Path, silence_s: float) -> list[Any]:
    path = scratch / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with open(scratch / "log.txt", "wb") as log:
        parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), str(path)],
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(parent, scratch, silence_s)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
    if parent.returncode:
        failed = scratch / "failed.json"
        rank = json.loads(failed.read_text(encoding="utf-8")) if failed.exists() else None
        said = _tail(scratch / ("log.txt" if rank is None else f"log-{rank}.txt"))
        raise RuntimeError(f"rank {rank} failed: {said}")
    found = [scratch / f"result-{rank}.json" for rank in range(len(job["ranks"]))]
    return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in found]


def _wait(parent: subprocess.Popen[bytes], scratch: Path, silence_s: float) -> None:
    """Wait for the ranks as long as their logs grow."""
    size, since = -1, time.monotonic()
    while True:
        try:
            parent.wait(timeout=min(1.0, silence_s))
        except subprocess.TimeoutExpired:
            now = sum(log.stat().st_size for log in scratch.glob("log*.txt"))
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > silence_s:
                said = _tail(scratch / "log-0.txt")
                raise TimeoutError(f"the ranks printed nothing for {silence_s:g} s: {said}") from None
        else:
            return


def _rank_environment(shape: Shape, network: _Network | None, rank: int, port: int, result: Path) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_RANK": str(rank % shape.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_node),
        "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0" if network else "lo",
        RESULT_PATH: str(result),
    }
    if network:
        variables[NODE_PROCESS] = str(network.node_process(rank))
    return variables


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else "it printed nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
