"""Ranks as real processes on a network with a slow link between nodes, and the bytes that crossed it.

    core ----- slow, inter_mbit each way ----- node 0 bridge --- rank 0 (eth0)
      |                                              \\---------- rank 1 (eth0)     intra_mbit each way
      +------- slow, inter_mbit each way ----- node 1 bridge --- rank 2 (eth0) ...

Every rank, node and the core is a network namespace, joined by veth pairs and bridges, shaped with `tc tbf`. It takes
root and iproute2; where they are missing the same processes run over the loopback interface, and the result says so.
A rank's script finds torch.distributed's variables set, gives back JSON through `write_result`, and reads what went
over the wire with `read_counters`.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "recmill"
RESULT_PATH = "RECMILL_RANK_RESULT"
NODE_PROCESS = "RECMILL_NODE_PROCESS"  # a process inside the namespace of this rank's node
BURST_BYTES = 256 * 1024  # above one 64 KiB segment of the kernel, which tbf would otherwise have to cut up


class NetworkUnavailable(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many ranks there are and how fast they talk; None leaves a link as fast as the machine is."""

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
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Run `script` once a rank and give what the ranks wrote.

    `network` is "namespaces" or "loopback", `note` says why it is not the former; `results` holds the ranks' JSON in
    order; `rank_bytes` and `node_bytes` are the interface counters of the whole run, {"sent", "received"} each (None
    on loopback).
    """
    shape = Shape(nodes=nodes, ranks_per_node=ranks_per_node, inter_mbit=inter_mbit, intra_mbit=intra_mbit)
    started = time.perf_counter()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recmill-ranks-")))
        try:
            network: _Network | None = stack.enter_context(_namespaces(shape))
            note = ""
        except NetworkUnavailable as error:
            network, note = None, f"no shaped network: {error}; the ranks talk over loopback at full speed"
        results = _run_ranks(shape, network, [str(script), *args], env or {}, scratch, timeout_s)
        return {
            "network": "loopback" if network is None else "namespaces",
            "note": note,
            "results": results,
            "rank_bytes": None if network is None else [network.rank_bytes(rank) for rank in range(shape.world_size)],
            "node_bytes": None if network is None else [network.node_bytes(node) for node in range(nodes)],
            "seconds": time.perf_counter() - started,
        }


def write_result(value: Any) -> None:
    """Give `value` (JSON) back to `run_on_nodes` from inside a rank."""
    Path(os.environ[RESULT_PATH]).write_text(json.dumps(value), encoding="utf-8")


def read_counters() -> dict[str, int] | None:
    """Bytes so far, seen from inside a rank; None on loopback, where ranks cannot be told apart.

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
    # /proc/PID/net belongs to the namespace of that process: no `ip netns exec` needed to look into another one.
    for line in Path(f"/proc/{process}/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return {"received": int(columns[0]), "sent": int(columns[8])}
    raise RuntimeError(f"/proc/{process}/net/dev: no interface {interface}")


@dataclass(frozen=True, kw_only=True)
class _Network:
    """The namespaces of a run and a process that sits in each."""

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
    rate = ["rate", f"{mbit:g}mbit", "burst", str(BURST_BYTES), "latency", "200ms"]
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(f"tc on {interface}: {done.stderr.strip() or done.returncode}")


@contextmanager
def _namespaces(shape: Shape) -> Iterator[_Network]:
    """The network of `shape`; taken down by name afterwards, whatever happened."""
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
            holders[name] = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "7200"])
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
    _ip("-n", outer, "link", "set", outer_name, "master", "bridge0", "up")
    _ip("-n", inner, "link", "set", inner_name, "up")
    _shape_link(outer, outer_name, mbit)
    _shape_link(inner, inner_name, mbit)


def _remove_namespaces(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Namespaces of runs that were killed before they could clean up."""
    folder = Path("/var/run/netns")
    for path in folder.glob(f"{PREFIX}-*") if folder.exists() else ():
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove_namespaces([path.name])


def _run_ranks(
    shape: Shape,
    network: _Network | None,
    command: Sequence[str],
    env: Mapping[str, str],
    scratch: Path,
    timeout_s: float,
) -> list[Any]:
    port = 29_400 if network else _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(shape.world_size):
            result = scratch / f"result-{rank}.json"
            variables = {**os.environ, **_rank_environment(shape, network, rank, port, result), **env}
            entry = ["ip", "netns", "exec", network.rank_namespace(rank)] if network else []
            with open(scratch / f"log-{rank}.txt", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*entry, sys.executable, *command],
                        env=variables,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(processes, scratch, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = [scratch / f"result-{rank}.json" for rank in range(shape.world_size)]
    return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in found]


def _rank_environment(shape: Shape, network: _Network | None, rank: int, port: int, result: Path) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_RANK": str(rank % shape.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_node),
        "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0" if network else "lo",
        "OMP_NUM_THREADS": "1",
        RESULT_PATH: str(result),
    }
    if network:
        variables[NODE_PROCESS] = str(network.node_process(rank))
    return variables


def _wait(processes: Sequence[subprocess.Popen[bytes]], scratch: Path, timeout_s: float) -> None:
    """Until all ranks are done; a rank that fails ends the run with the last lines it printed."""
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks did not finish within {timeout_s:g} s: {_tail(scratch, 0)}")
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.poll() not in (None, 0):
            raise RuntimeError(f"rank {rank} ended with exit code {process.returncode}: {_tail(scratch, rank)}")


def _tail(scratch: Path, rank: int) -> str:
    return (scratch / f"log-{rank}.txt").read_text(encoding="utf-8", errors="replace")[-2000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
