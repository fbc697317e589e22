"""What rows in tiers save on a network with a slow link between nodes: bytes by kind and communication time per step.

    python benchmarks/flexshard.py [--quick] [--json PATH|-] [--seed K] [--only PART]

Parts are "planner gap", zipf08, zipf10, zipf12, globo, simulation.

Two nodes of four ranks, real processes in network namespaces. A rank's link is ten times as fast as its node's uplink.
Every side looks up the same ids and updates the same tables, in turns: TorchRec row-wise and table-wise as shipped,
row-wise + id dedup (our exchange with every row global, ids as wide as ours: the strongest rival) and what
`plan_shards` chooses (tiers, merged requests of a node) from a profile of an earlier time span, with the same memory
budget per rank; the last two also with bfloat16 on the wire. Bytes are counted at the interfaces and split by kind in
proportion to the payload. The communication time of a step is the time inside its collectives, each started when all
of its ranks are ready, on the slowest rank. A simulation calibrated on these runs covers 16 x 8 and 128 x 8 ranks.
Without namespaces, everything that depends on the network is skipped.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flexshard_sides import NODES, RANKS_PER_NODE, SIDES, WORLD, Side, case_metrics, prediction_error, print_bytes
from flexshard_simulation import calibrate, simulate
from flexshard_workloads import Table, Workload, globo_workload, save_batches, write_profile, zipf_law, zipf_workload
from harness import (
    Metric,
    Options,
    parse_options,
    plain_count,
    say,
    warn_if_busy,
    without_network,
)
from parts import Found, Parts
from shaped_network import run_on_nodes

from recmill.artifacts import ShardPlan
from recmill.planning.planner import Topology, plan_shards

EXPONENTS = (0.8, 1.0, 1.2)
LINK_RATIO = 10
MEMORY_SLACK = 1.05  # every side may use 5% more memory than row-wise sharding needs


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a run. Row counts and batches shrink together, so that reads per row stay about the same."""

    num_rows: int
    dim: int
    samples: int  # per rank and step, Zipf
    globo_samples: int
    num_steps: int
    inter_mbit: float  # of a node's uplink; LINK_RATIO times that is a rank's link
    num_instances: int  # number of random planning problems


SIZES = {
    "tiny": Size(num_rows=1000, dim=8, samples=8, globo_samples=16, num_steps=2, inter_mbit=1000, num_instances=1),
    "quick": Size(
        num_rows=100_000, dim=32, samples=1024, globo_samples=2048, num_steps=10, inter_mbit=100, num_instances=5
    ),
    "full": Size(
        num_rows=400_000, dim=64, samples=2048, globo_samples=4096, num_steps=10, inter_mbit=200, num_instances=20
    ),
}


def topology_of(size: Size) -> Topology:
    return Topology(
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        inter_node_bytes_per_s=size.inter_mbit * 1e6 / 8 / RANKS_PER_NODE,
        intra_node_bytes_per_s=LINK_RATIO * size.inter_mbit * 1e6 / 8,
        intra_node_latency_s=1e-3,  # eight gloo processes on few cores: a message costs a thread's wake-up
        inter_node_latency_s=1e-3,
    )


def make_workloads(size: Size, seed: int) -> tuple[list[Workload], dict[str, str]]:
    """All workloads, and the reason if globo is missing."""
    made = [
        zipf_workload(
            exponent,
            num_rows=size.num_rows,
            dim=size.dim,
            samples_per_rank=size.samples,
            world_size=WORLD,
            num_steps=size.num_steps,
            seed=seed,
        )
        for exponent in EXPONENTS
    ]
    folder = os.environ.get("RECMILL_DATA_DIR", "")
    path = Path(folder) / "globo" / "clicks.parquet"
    names = [f"{name}_globo" for name in ("alltoall_bytes", "total_bytes", "inter_node_bytes", "comm_time")]
    names += ["comm_time_globo_vs_dedup", "comm_time_globo_bf16_vs_dedup"]
    if not folder:
        return made, dict.fromkeys(names, "RECMILL_DATA_DIR is not set")
    if not path.exists():
        return made, dict.fromkeys(names, "RECMILL_DATA_DIR holds no globo/clicks.parquet")
    made.append(
        globo_workload(
            path,
            dim=size.dim,
            samples_per_rank=size.globo_samples,
            world_size=WORLD,
            num_steps=size.num_steps,
            seed=seed,
        )
    )
    return made, {}


def row_wise_bytes(workload: Workload) -> int:
    """Bytes per rank of tables sharded by rows."""
    return sum(-(-table.num_rows // WORLD) * (workload.dim + 1) * 4 for table in workload.tables)


def prepare(workload: Workload, folder: Path, topology: Topology) -> dict[str, Any]:
    """Profile, plan and batches of one workload on disk."""
    folder.mkdir()
    profile = write_profile(workload, folder / "profile")
    plan_shards(
        profile,
        out=folder / "plan",
        topology=topology,
        memory_budget_bytes=int(MEMORY_SLACK * row_wise_bytes(workload)) + 4096,
        batch_size=workload.samples_per_rank * topology.world_size,
    )
    save_batches(workload, folder)
    return {
        "tables": [asdict(table) for table in workload.tables],
        "dim": workload.dim,
        "ranks_per_node": topology.ranks_per_node,
    }


def planner_gap(folder: Path, *, count: int, seed: int) -> Metric:
    """Gap of plans of random tables, machines and budgets to their proven lower bound."""
    rng = np.random.default_rng(seed)
    gaps = []
    for number in range(count):
        tables = tuple(
            Table(name=f"t{t}", num_rows=int(rng.integers(100, 50_000)), mean_length=float(rng.integers(1, 50)))
            for t in range(int(rng.integers(2, 12)))
        )
        topology = Topology(
            nodes=int(rng.integers(1, 5)),
            ranks_per_node=int(rng.integers(2, 9)),
            inter_node_bytes_per_s=float(10 ** rng.uniform(7, 9.5)),
        )
        counts = {
            table.name: rng.permutation(
                rng.poisson(2000 * table.mean_length * zipf_law(table.num_rows, float(rng.uniform(0.5, 1.3))))
            )
            for table in tables
        }
        workload = Workload(
            name=f"random{number}",
            tables=tables,
            dim=int(rng.choice([16, 32, 64])),
            samples_per_rank=256,
            num_profiled=2000,
            counts=counts,
            batches=[],
        )
        needed = sum(table.num_rows for table in tables) * (workload.dim + 1) * 4 / topology.world_size
        plan = plan_shards(
            write_profile(workload, folder / f"profile{number}"),
            out=folder / f"plan{number}",
            topology=topology,
            memory_budget_bytes=int(needed * rng.uniform(1.1, 2.0)) + 100_000,
            batch_size=256 * topology.world_size,
        )
        gaps.append(plan.objective / plan.bound - 1 if plan.bound else 0.0)
    note = f"objective over proven bound, less 1, of {count} random problems: worst {max(gaps):.2%}"
    return plain_count(max(gaps), unit="share", note=note)


def run(options: Options, folder: Path) -> None:
    size = SIZES[options.size]
    topology = topology_of(size)
    workloads, skipped = make_workloads(size, options.seed)
    described = {workload.name: prepare(workload, folder / workload.name, topology) for workload in workloads}
    plans = {name: ShardPlan.load(folder / name / "plan") for name in described}
    for name, plan in plans.items():
        tiers = {t: {tier.kind: tier.num_rows for tier in e.tiers} for t, e in plan.tables.items()}
        say(f"{name}: {tiers}, {'merged' if plan.merges_nodes else 'direct'} requests")
    parts = Parts(options)
    parts.skipped |= skipped
    parts.measure("planner gap", lambda: _gap(folder, size, options.seed))
    for workload in workloads:
        name = workload.name
        case = {name: described[name]}
        parts.measure(name, partial(measure_ranks, folder, size, workload, plans[name], case))
    if set(parts.extra.get("bytes", {})) == set(plans):
        parts.measure("simulation", lambda: _simulation(folder, workloads, parts.extra))
    parts.finish()


def _simulation(folder: Path, workloads: Sequence[Workload], extra: Mapping[str, Any]) -> Found:
    """The error of predicted bytes over all workloads, and the simulation calibrated on them."""
    cases = {name: {side: Side(**own) for side, own in sides.items()} for name, sides in extra["bytes"].items()}
    measured = {name: sides["tiers"].total for name, sides in cases.items()}
    metrics = {"predicted_bytes_error": prediction_error(extra["predicted_bytes"], measured)}
    network = extra["network"]
    metrics, unshaped = without_network(metrics, list(metrics), kind=network["kind"], note=network["note"])
    simulated = simulate(workloads, calibrate(cases, nodes=NODES), folder)
    for line in simulated["table"]:
        say(line)
    return Found(metrics=metrics, skipped=unshaped, extra={"simulation": simulated})


def _gap(folder: Path, size: Size, seed: int) -> Found:
    return Found(metrics={"planner_gap": planner_gap(folder, count=size.num_instances, seed=seed)})


def measure_ranks(
    folder: Path, size: Size, workload: Workload, plan: ShardPlan, case: Mapping[str, Mapping[str, Any]]
) -> Found:
    """Bytes and times of one workload on real processes."""
    name = workload.name
    say(
        f"{name}: start {WORLD} ranks on {NODES} nodes, {size.inter_mbit:g} Mbit/s between them, "
        f"{LINK_RATIO * size.inter_mbit:g} inside"
    )
    (folder / "cases.json").write_text(json.dumps(case), encoding="utf-8")
    found = run_on_nodes(
        Path(__file__).with_name("flexshard_rank.py"),
        [str(folder)],
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        inter_mbit=size.inter_mbit,
        intra_mbit=LINK_RATIO * size.inter_mbit,
        preload=["flexshard_rank"],
    )
    if found["note"]:
        say(found["note"])
    ranks = [own[name] for own in found["results"]]
    sides = {
        side: Side.of([own[side] for own in ranks], merged=side.startswith("tiers") and plan.merges_nodes)
        for side in SIDES
    }
    print_bytes({name: sides})
    assert plan.prediction is not None
    metrics = case_metrics(name, sides, merging_bound(workload))
    metrics, unshaped = without_network(metrics, list(metrics), kind=found["network"], note=found["note"])
    memory = {
        "budget": plan.memory_budget_bytes,
        "row_wise": row_wise_bytes(workload),
        "tiers": max(own["memory_bytes"]["tiers"] for own in ranks),
    }
    extra = {
        "network": {
            "kind": found["network"],
            "note": found["note"],
            "inter_mbit": size.inter_mbit,
            "intra_mbit": LINK_RATIO * size.inter_mbit,
        },
        "bytes": {name: {side: asdict(own) for side, own in sides.items()}},
        "predicted_bytes": {name: plan.prediction.bytes.total},
        "memory_bytes": {name: memory},
        "merged": {name: plan.merges_nodes},
    }
    return Found(metrics=metrics, skipped=unshaped, extra=extra)


def merging_bound(workload: Workload) -> float:
    """Distinct rows of all ranks over distinct rows of all nodes: how much less merging can send between two nodes.

    On two nodes a node that reads a row costs one vector between them on average, with or without a second copy: the
    row and its gradient cross if the other node holds it (every second time), or its gradient crosses to the copy.
    """
    apart = merged = 0
    for ranks in workload.batches:
        for table in workload.tables:
            distinct = [np.unique(own[table.name][0]) for own in ranks]
            apart += sum(map(len, distinct))
            nodes = [distinct[first : first + RANKS_PER_NODE] for first in range(0, WORLD, RANKS_PER_NODE)]
            merged += sum(len(np.unique(np.concatenate(own))) for own in nodes)
    return apart / merged


def main() -> None:
    options = parse_options(__doc__ or "", quick="100,000 rows and 1,024 samples per rank instead of 400,000 and 2,048")
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="flexshard-") as scratch:
        run(options, Path(scratch))


if __name__ == "__main__":
    main()
