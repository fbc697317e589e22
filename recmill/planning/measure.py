"""Measures how fast ranks communicate, on the ranks themselves.

`torchrun ... -m recmill.planning.measure OUT.yaml` on the machines of a job times all-to-all, all-gather and all-reduce
inside every node and between nodes, over messages of several sizes, and fits seconds = latency + bytes / bandwidth.
All ranks of a node communicate at once, as in training: a rank's bandwidth between nodes is its share of the uplink.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recmill.artifacts import InputError, held_folder
from recmill.artifacts.topology import COLLECTIVES, LEVELS, Link, Topology
from recmill.progress import Progress, no_progress

SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # sent by one rank
REPEATS = 5
TIMEOUT_S = 120


def measure_topology(topology: Topology, *, progress: Progress = no_progress) -> Topology:
    """The topology with speeds measured between as many ranks on this machine."""
    if topology.nodes > 1:
        raise InputError(
            f"--measure starts ranks on one machine, but the topology has {topology.nodes} nodes: run "
            f"`torchrun --nnodes {topology.nodes} --nproc-per-node {topology.ranks_per_node} ... "
            "-m recmill.planning.measure topology.yaml` on them and pass --topology topology.yaml"
        )
    if topology.world_size == 1:
        return topology  # nothing to measure
    progress("time collectives", 0, len(COLLECTIVES))
    with held_folder(purpose="measure") as scratch:
        out = scratch / "topology.yaml"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(topology.world_size), "-m", "recmill.planning.measure", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise InputError(f"--measure: {topology.world_size} ranks did not answer within {TIMEOUT_S} s") from None
        if ran.returncode or not out.exists():
            lines = [line for line in ran.stderr.splitlines() if "Error" in line] or ran.stderr.splitlines()[-1:]
            raise InputError(f"--measure: the ranks failed: {' '.join(lines[:1])[:300] or ran.returncode}")
        found = Topology.load(out)
    progress("time collectives", len(COLLECTIVES), len(COLLECTIVES))
    speeds = {name: getattr(found, name) for name in ("intra_node_bytes_per_s", "intra_node_latency_s")}
    return replace(topology, collectives=found.collectives, **speeds)


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Latency and bandwidth by least squares on relative errors, so that small messages count as much as large."""
    sizes_, seconds_ = np.asarray(sizes, float), np.asarray(seconds, float)
    weighted = np.stack([1 / seconds_, sizes_ / seconds_], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(weighted, np.ones(len(sizes_)), rcond=None)
    if latency < 0:  # a line through the origin
        latency, per_byte = 0.0, float((sizes_ / seconds_).sum() / (sizes_**2 / seconds_**2).sum())
    if per_byte <= 0:  # times do not grow with the size: take the best rate seen
        per_byte = float((seconds_ / sizes_).min())
    return Link(bytes_per_s=float(1 / per_byte), latency_s=float(latency))


def run_rank(out: str) -> None:
    """Time the collectives of this rank's groups; rank 0 writes the topology."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        device = torch.device("cuda", rank % per_node) if torch.cuda.is_available() else torch.device("cpu")
        rings = {
            "intra": [list(range(start, start + per_node)) for start in range(0, world, per_node)],
            "inter": [list(range(local, world, per_node)) for local in range(per_node)],
        }
        speeds: dict[str, dict[str, float]] = {name: {} for name in COLLECTIVES}
        for level in LEVELS:
            groups = [(ranks, dist.new_group(ranks)) for ranks in rings[level]]
            ranks, group = next(pair for pair in groups if rank in pair[0])
            if len(ranks) == 1:
                continue
            for name, send in _collectives(len(ranks), group, device).items():
                link = fit_link(SIZES_BYTES, [_time(send, size, device) for size in SIZES_BYTES])
                speeds[name] |= {
                    f"{level}_node_bytes_per_s": link.bytes_per_s,
                    f"{level}_node_latency_s": link.latency_s,
                }
        if rank == 0:
            # Its general speeds are those of the all-to-all, which lookups use.
            plain: dict[str, Any] = dict(speeds["all_to_all"])
            nodes = world // per_node
            Topology(nodes=nodes, ranks_per_node=per_node, device=device.type, collectives=speeds, **plain).save(out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _collectives(size: int, group: Any, device: Any) -> dict[str, Callable[[int], None]]:
    """Every collective as a function of the bytes that a rank sends to others."""
    import torch
    import torch.distributed as dist

    def floats(num_bytes: float) -> Any:
        return torch.ones(max(int(num_bytes) // 4, 1), device=device)

    def all_to_all(num_bytes: int) -> None:
        part = floats(num_bytes / (size - 1))
        sent = part.repeat(size)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)

    def all_gather(num_bytes: int) -> None:
        part = floats(num_bytes / (size - 1))
        dist.all_gather_into_tensor(part.repeat(size), part, group=group)

    def all_reduce(num_bytes: int) -> None:
        dist.all_reduce(floats(num_bytes * size / (2 * (size - 1))), group=group)

    return {"all_to_all": all_to_all, "all_gather": all_gather, "all_reduce": all_reduce}


def _time(send: Callable[[int], None], num_bytes: int, device: Any) -> float:
    """Seconds of the slowest rank: the median of a few calls after one to warm up."""
    import torch
    import torch.distributed as dist

    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        send(num_bytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    slowest = torch.tensor([float(np.median(taken[1:]))], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun ... -m recmill.planning.measure OUT.yaml")
    run_rank(sys.argv[1])
