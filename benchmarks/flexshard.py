"""What rows in tiers save on a network with a slow link between nodes: bytes by kind and communication time per step.

    python benchmarks/flexshard.py [--quick] [--json PATH|-] [--seed K]

Two nodes of four ranks, real processes in network namespaces. Every side looks up the same ids and updates the same
tables, in turns: TorchRec row-wise and table-wise as shipped, row-wise + id dedup (our exchange with every row global,
ids as wide as ours: the strongest rival) and the tiers that `plan_shards` chooses from a profile of an earlier time
span, with the same memory budget per rank. Bytes are counted at the interfaces and split by kind in proportion to the
payload. The communication time of a step is the time inside its collectives, each started when all of its ranks are
ready, on the slowest rank. A simulation calibrated on these runs covers 16 x 8 and 128 x 8 ranks. Without namespaces,
everything that depends on the network is skipped.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flexshard_simulation import calibrate, simulate
from flexshard_workloads import Table, Workload, globo_workload, save_batches, write_profile, zipf_law, zipf_workload
from harness import (
    Metric,
    Options,
    compare,
    compare_counts,
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

NODES, RANKS_PER_NODE = 2, 4
WORLD = NODES * RANKS_PER_NODE
EXPONENTS = (0.8, 1.0, 1.2)
MEMORY_SLACK = 1.05  # every side may use 5% more memory than row-wise sharding needs
SIDES = ("row_wise", "table_wise", "dedup", "tiers")
A2A = ("ids", "vectors", "gradients")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a run. Row counts and batches shrink together, so that reads per row stay about the same."""

    num_rows: int
    dim: int
    samples: int  # per rank and step, Zipf
    globo_samples: int
    num_steps: int
    inter_mbit: float
    num_instances: int  # number of random planning problems


SIZES = {
    "tiny": Size(num_rows=1000, dim=8, samples=8, globo_samples=16, num_steps=2, inter_mbit=1000, num_instances=1),
    "quick": Size(
        num_rows=100_000, dim=32, samples=1024, globo_samples=2048, num_steps=3, inter_mbit=400, num_instances=5
    ),
    "full": Size(
        num_rows=400_000, dim=64, samples=2048, globo_samples=4096, num_steps=10, inter_mbit=500, num_instances=20
    ),
}


def topology_of(size: Size) -> Topology:
    return Topology(
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        inter_node_bytes_per_s=size.inter_mbit * 1e6 / 8 / RANKS_PER_NODE,
        intra_node_bytes_per_s=0.5e9,
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
    names.append("comm_time_globo_vs_dedup")
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


@dataclass(frozen=True, kw_only=True)
class Side:
    """Measurements of one side over all ranks: bytes of one step, seconds of several."""

    all_to_all: float
    sync: float
    total: float
    inter_node: float
    largest_rank: float
    payload: float
    ids: float
    comm_seconds: list[float]
    step_seconds: list[float]
    messages: float

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Side:
        """Combine all ranks' steps; the first step gives the bytes, the others the times."""
        first = [steps[0] for steps in ranks]
        payload = sum(step["sent"] for step in first)
        phases = [step.get("phases", {}) for step in first]
        lookups = sum(count for own in phases for name, count in own.items() if name.split("/")[0] in A2A)
        share = lookups / payload if any(phases) and payload else 1.0
        if "interface" in first[0]:
            sent = [step["interface"]["sent"] for step in first]
            nodes = [first[node * RANKS_PER_NODE]["interface"]["node_sent"] for node in range(NODES)]
        else:
            sent, nodes = [step["sent"] for step in first], [0]
        timed = [steps[1:] or steps for steps in ranks]
        return cls(
            all_to_all=share * sum(sent),
            sync=(1 - share) * sum(sent),
            total=float(sum(sent)),
            inter_node=float(sum(nodes)),
            largest_rank=float(max(sent)),
            payload=float(payload),
            ids=float(sum(count for own in phases for name, count in own.items() if name.startswith("ids"))),
            comm_seconds=[
                max(own) for own in zip(*([s["comm_seconds"] for s in steps] for steps in timed), strict=True)
            ],
            step_seconds=[max(steps[0]["step_seconds"] for steps in ranks)],
            messages=first[0]["messages"],
        )


def case_metrics(name: str, sides: Mapping[str, Side]) -> dict[str, Metric]:
    """The metrics of one workload against row-wise + id dedup, and against TorchRec row-wise as shipped."""
    base, dedup, ours = sides["row_wise"], sides["dedup"], sides["tiers"]
    metrics = {
        f"total_bytes_{name}": compare_counts(
            dedup.total,
            ours.total,
            unit="bytes/step",
            note=f"row-wise + id dedup, ids as wide as ours; {dedup.all_to_all / ours.all_to_all:.2f}x in the "
            f"all-to-all, {dedup.largest_rank / ours.largest_rank:.2f}x at the largest rank",
        ),
        f"comm_time_{name}_vs_dedup": _compare_seconds(dedup, ours, note="row-wise + id dedup, ids as wide as ours"),
        f"alltoall_bytes_{name}": compare_counts(
            base.all_to_all,
            ours.all_to_all,
            unit="bytes/step",
            note=f"TorchRec row-wise as shipped; {base.total / ours.total:.2f}x in total, "
            f"{_ratio(base.inter_node, ours.inter_node)} between nodes",
        ),
        f"comm_time_{name}": _compare_seconds(
            base,
            ours,
            note="TorchRec row-wise as shipped; "
            f"table-wise takes {statistics.median(sides['table_wise'].comm_seconds):.3g} s",
        ),
    }
    if ours.inter_node:
        metrics[f"inter_node_bytes_{name}"] = compare_counts(
            dedup.inter_node, ours.inter_node, unit="bytes/step", note="row-wise + id dedup, ids as wide as ours"
        )
    return metrics


def _compare_seconds(theirs: Side, ours: Side, *, note: str) -> Metric:
    return compare(theirs.comm_seconds, ours.comm_seconds, unit="s/step", less_is_better=True, note=note)


def _ratio(baseline: float, ours: float) -> str:
    return f"{baseline / ours:.2f}x" if ours else "not counted"


def prediction_error(plans: Mapping[str, ShardPlan], cases: Mapping[str, Mapping[str, Side]]) -> Metric:
    """Relative error of the plans' bytes against the interfaces: the worst workload; the note has all."""
    errors = {name: abs(plans[name].prediction.bytes.total / sides["tiers"].total - 1) for name, sides in cases.items()}
    note = "predicted total bytes of a step against measured; " + ", ".join(f"{n} {e:.1%}" for n, e in errors.items())
    return plain_count(max(errors.values()), unit="share", note=note)


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


def print_bytes(cases: Mapping[str, Mapping[str, Side]]) -> None:
    say("bytes of a step over all ranks, and seconds:")
    say(
        f"{'':20}{'all-to-all':>13}{'sync':>12}{'total':>13}{'inter-node':>13}{'largest':>12}{'comm s':>9}{'step s':>9}"
    )
    for name, sides in cases.items():
        for side, own in sides.items():
            numbers = (own.all_to_all, own.sync, own.total, own.inter_node, own.largest_rank)
            widths = (13, 12, 13, 13, 12)
            line = "".join(f"{value:{width},.0f}" for value, width in zip(numbers, widths, strict=True))
            times = statistics.median(own.comm_seconds), statistics.median(own.step_seconds)
            say(f"{name + ' ' + side:20}{line}{times[0]:9.3f}{times[1]:9.3f}")


def run(options: Options, folder: Path) -> None:
    size = SIZES[options.size]
    topology = topology_of(size)
    workloads, skipped = make_workloads(size, options.seed)
    described = {workload.name: prepare(workload, folder / workload.name, topology) for workload in workloads}
    (folder / "cases.json").write_text(json.dumps(described), encoding="utf-8")
    plans = {name: ShardPlan.load(folder / name / "plan") for name in described}
    for name, plan in plans.items():
        tiers = {t: {tier.kind: tier.num_rows for tier in e.tiers} for t, e in plan.tables.items()}
        say(f"{name}: {tiers}")
    parts = Parts(options)
    parts.skipped |= skipped
    parts.measure("planner gap", lambda: _gap(folder, size, options.seed))
    parts.measure("ranks", lambda: measure_ranks(folder, size, workloads, plans))
    parts.finish()


def _gap(folder: Path, size: Size, seed: int) -> Found:
    return Found(metrics={"planner_gap": planner_gap(folder, count=size.num_instances, seed=seed)})


def measure_ranks(folder: Path, size: Size, workloads: Sequence[Workload], plans: Mapping[str, ShardPlan]) -> Found:
    """Bytes and times of all workloads on real processes, and the simulation that is calibrated on them."""
    say(f"start {WORLD} ranks on {NODES} nodes, {size.inter_mbit:g} Mbit/s between them")
    found = run_on_nodes(
        Path(__file__).with_name("flexshard_rank.py"),
        [str(folder)],
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        inter_mbit=size.inter_mbit,
        preload=["flexshard_rank"],
    )
    if found["note"]:
        say(found["note"])
    cases = {
        name: {side: Side.of([ranks[name][side] for ranks in found["results"]]) for side in SIDES} for name in plans
    }
    print_bytes(cases)
    metrics: dict[str, Metric] = {}
    for name, sides in cases.items():
        metrics |= case_metrics(name, sides)
    metrics["predicted_bytes_error"] = prediction_error(plans, cases)
    metrics, unshaped = without_network(metrics, list(metrics), kind=found["network"], note=found["note"])
    calibration = calibrate(cases, nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    simulated = simulate(workloads, calibration, folder)
    for line in simulated["table"]:
        say(line)
    memory = {name: [ranks[name]["memory_bytes"] for ranks in found["results"]] for name in plans}
    extra = {
        "network": {"kind": found["network"], "note": found["note"], "inter_mbit": size.inter_mbit},
        "bytes": {name: {side: asdict(own) for side, own in sides.items()} for name, sides in cases.items()},
        "memory_bytes": {
            name: {
                "budget": plans[name].memory_budget_bytes,
                "row_wise": row_wise_bytes(next(w for w in workloads if w.name == name)),
                "tiers": max(own["tiers"] for own in ranks),
            }
            for name, ranks in memory.items()
        },
        "simulation": simulated,
    }
    return Found(metrics=metrics, skipped=unshaped, extra=extra)


def main() -> None:
    options = parse_options(__doc__ or "", quick="100,000 rows and 1,024 samples per rank instead of 400,000 and 2,048")
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="flexshard-") as scratch:
        run(options, Path(scratch))


if __name__ == "__main__":
    main()
