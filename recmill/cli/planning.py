"""`recmill plan`."""

from __future__ import annotations

from typing import Any

import click

from recmill.cli.output import BYTES, emit, format_bytes, json_option, progress_for


@click.command()
@click.argument("profile")
@click.option("--out", required=True, help="Folder to write the plan to.")
@click.option(
    "--topology", "topology_file", help="YAML with nodes, ranks_per_node and bandwidths. Default: one machine."
)
@click.option("--nproc", default=1, show_default=True, help="Ranks on this machine, when no --topology is given.")
@click.option(
    "--memory-budget", type=BYTES, default="1GiB", show_default=True, help="Bytes a rank for rows and optimiser state."
)
@click.option("--batch-size", default=2048, show_default=True, help="Samples of one step over all ranks.")
@json_option
def plan(
    profile: str, out: str, topology_file: str | None, nproc: int, memory_budget: int, batch_size: int, as_json: bool
) -> None:
    """Decide where every embedding table of PROFILE lives, within a memory budget.

    \b
    Example topology.yaml:
      nodes: 2
      ranks_per_node: 4
      intra_node_bytes_per_s: 10e9
      inter_node_bytes_per_s: 1.25e9
    """
    from recmill.planning.planner import Topology, plan_shards

    topology = Topology.load(topology_file) if topology_file else Topology.local(nproc)
    shard_plan = plan_shards(
        profile,
        out=out,
        topology=topology,
        memory_budget_bytes=memory_budget,
        batch_size=batch_size,
        progress=progress_for(as_json),
    )
    emit(
        {"path": out, "content_hash": shard_plan.content_hash, **shard_plan.body},
        _describe(shard_plan.body, out),
        as_json=as_json,
    )


def _describe(body: Any, out: str) -> list[str]:
    lines = [f"{'table':<24}{'rows':>14}{'size':>12}  {'placement':<12}{'ranks':<12}{'moved a step':>14}"]
    for name, table in body["tables"].items():
        tier = table["tiers"][0]
        ranks = ",".join(str(shard["rank"]) for shard in table["shards"])
        moved = format_bytes(tier["predicted_bytes_per_step"])
        size = format_bytes(tier["bytes"])
        lines.append(f"{name:<24}{tier['num_rows']:>14,}{size:>12}  {table['sharding']:<12}{ranks:<12}{moved:>14}")
    largest = max(body["rank_bytes"])
    lines.append(f"largest rank {format_bytes(largest)} of {format_bytes(body['memory_budget_bytes'])}; plan in {out}")
    return lines
