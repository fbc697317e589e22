"""`recmill plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from recmill.artifacts import InputError, ShardPlan, is_remote
from recmill.cli.output import BYTES, HOT_BUDGET, emit, json_option, progress_for, verify_option
from recmill.sizes import format_bytes


@click.command()
@click.argument("profile")
@click.option("--out", required=True, help="Folder for the plan.")
@click.option(
    "--topology", "topology_file", help="YAML with nodes, ranks_per_node and bandwidths. Default: one machine."
)
@click.option("--nproc", default=1, help="Ranks on this machine, without --topology.")
@click.option(
    "--memory-budget",
    "memory_budget_bytes",
    type=BYTES,
    default="1GiB",
    help="Per-rank budget for rows, optimiser state and lookup indexes.",
)
@click.option("--batch-size", default=2048, help="Samples per step, over all ranks.")
@click.option(
    "--strategy",
    type=click.Choice(["tiers", "torchrec"]),
    default="tiers",
    help="Place rows by how often they are read, or tables by TorchRec's own planner.",
)
@click.option(
    "--total-bytes",
    "total_bytes_ratio",
    default="any",
    help="Limit on bytes sent by all ranks, as a multiple of row-wise sharding with id dedup; `any`: no limit.",
)
@click.option(
    "--merge",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Merge the ids and gradients of a node before they cross to another one; auto: if that is faster.",
)
@click.option(
    "--wire",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Type of rows and gradients in messages; bfloat16 rounds them.",
)
@click.option(
    "--hot-budget",
    "hot_budget_bytes",
    type=HOT_BUDGET,
    default="none",
    help="Memory per rank for the hot rows of hot batches: a size (16MiB) or auto, what gains most.",
)
@click.option(
    "--compress",
    help="Share parameters: auto, a factor (100) or a size for all shared tables (64MiB). Default: no sharing.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    help="Precision of parameters shared by --compress; int8 fits three times as many into the same memory.",
)
@click.option("--measure", is_flag=True, help="Measure the collectives of the ranks first; writes OUT-topology.yaml.")
@click.option("--from", "previous", help="Older plan to start from; only rows whose move pays are moved.")
@click.option("--steps", "previous_steps", default=10_000, help="Training steps over which a move of --from must pay.")
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    help="Ingestion cores per rank. Default: an equal share of this machine's cores.",
)
@click.option("--explain", is_flag=True, help="Explain the plan, then every table.")
@verify_option
@json_option
def plan(
    profile: str,
    out: str,
    topology_file: str | None,
    nproc: int,
    total_bytes_ratio: str,
    measure: bool,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Decide where every row of the embedding tables of PROFILE lives, within a memory budget.

    The rows read most often are replicated on every rank, warm rows are kept once per node, cold rows are spread over
    all ranks, so that the predicted communication time per step is minimal; `--explain` gives the reasons.

    \b
    Example topology.yaml:
      nodes: 2
      ranks_per_node: 4
      intra_node_bytes_per_s: 10e9
      inter_node_bytes_per_s: 1.25e9    # a rank's share of its node's uplink
    """
    from recmill.planning.planner import Topology, plan_shards

    progress = progress_for(as_json)
    if options["hot_budget_bytes"] == "none":
        options["hot_budget_bytes"] = None
    topology = Topology.load(topology_file) if topology_file else Topology.local(nproc)
    measured = None
    if measure:
        from recmill.planning.measure import measure_topology

        if is_remote(out):
            raise InputError(f"--out {out}: --measure writes the topology beside the plan, on a local path")
        topology = measure_topology(topology, progress=progress)
        measured = str(Path(out).absolute().with_name(Path(out).name + "-topology.yaml"))
        topology.save(measured)
    ratio = _ratio(total_bytes_ratio)
    shard_plan = plan_shards(profile, out=out, topology=topology, total_bytes_ratio=ratio, progress=progress, **options)
    lines = _describe(shard_plan, out)
    if measured:
        lines.append(f"measured topology in {measured}")
    if explain:
        lines += _explain(shard_plan)
    emit(
        {"path": out, "content_hash": shard_plan.content_hash, "measured_topology": measured, **shard_plan.to_json()},
        lines,
        as_json=as_json,
    )


def _ratio(text: str) -> float | None:
    if text == "any":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--total-bytes is {text!r}, expected a number of 1 or more, or `any`") from None


def _describe(plan: ShardPlan, out: str) -> list[str]:
    lines = [f"{'table':<24}{'tier':<12}{'rows':>14}{'all copies':>12}{'sent per step':>14}{'time per step':>14}"]
    for name, table in plan.tables.items():
        for tier in table.tiers:
            sent, held = format_bytes(tier.predicted_bytes_per_step), format_bytes(tier.bytes)
            seconds = f"{tier.predicted_seconds_per_step * 1e6:,.1f} us"
            lines.append(f"{name:<24}{tier.kind:<12}{f'{tier.num_rows:,}':>14}{held:>12}{sent:>14}{seconds:>14}")
            name = ""
    lines += _describe_prediction(plan)
    if refresh := plan.refresh:
        scratch = refresh.from_scratch
        lines.append(
            f"moves {refresh.moved_rows:,} rows ({format_bytes(refresh.moved_bytes)}); a plan from scratch would "
            f"move {scratch.moved_rows:,} ({format_bytes(scratch.moved_bytes)}) to take "
            f"{scratch.seconds * 1e3:.3f} ms instead of {refresh.seconds * 1e3:.3f} ms per step"
        )
    if plan.hot_set:
        lines.append(f"hot set: {format_bytes(plan.hot_set.bytes)} per rank; {plan.hot_set.reason}")
    if plan.shared:
        tables = ", ".join(plan.shared.tables)
        lines.append(f"shared parameters: {format_bytes(plan.shared.array_bytes)} for {tables}")
    largest = max(plan.rank_bytes)
    lines.append(f"largest rank {format_bytes(largest)} of {format_bytes(plan.memory_budget_bytes)}; plan in {out}")
    return lines


def _describe_prediction(plan: ShardPlan) -> list[str]:
    if plan.prediction is None:
        return []
    sent, baseline = plan.prediction.bytes, plan.prediction.row_wise_dedup
    seconds, bound, gap = (value or 0.0 for value in (plan.objective, plan.bound, plan.gap))
    return [
        f"communication takes {seconds * 1e3:.3f} ms per step (proven bound {bound * 1e3:.3f} ms, gap {gap:.2%}); "
        f"every row global: {baseline.seconds * 1e3:.3f} ms",
        f"bytes over all ranks: {format_bytes(sent.total)}, {format_bytes(sent.inter_node)} between nodes, "
        f"{format_bytes(sent.all_to_all)} by all-to-all; row-wise with distinct ids: "
        f"{format_bytes(baseline.total)}, {format_bytes(baseline.inter_node)} between nodes",
    ]


def _explain(plan: ShardPlan) -> list[str]:
    lines = [line for paragraph in plan.why for line in ("", paragraph)]
    for name, table in plan.tables.items():
        lines += ["", f"{name}: {table.why or 'placed by TorchRec, which gives no reason'}"]
    return lines
