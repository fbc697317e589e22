"""Whether the requests of a node are merged before they cross to another node: the faster of two plans."""

from __future__ import annotations

from dataclasses import replace

from recmill.planning.tiers.costs import count_bytes
from recmill.planning.tiers.problem import TierProblem
from recmill.planning.tiers.solution import Solved, solve_tiers

MERGE_CHOICES = ("auto", "on", "off")


def solve_routes(problem: TierProblem, *, merge: str = "auto") -> tuple[TierProblem, Solved]:
    """The problem with the better routing, and its solution; the bound holds for both routings under "auto".

    Merged requests take bytes off the links between nodes for more bytes and messages inside nodes.
    """
    merged = replace(problem, routing=replace(problem.routing, merges_nodes=True))
    if merge == "off" or not _can_merge(merged):
        return problem, solve_tiers(problem)
    if merge == "on":
        return merged, solve_tiers(merged)
    found = solve_tiers(merged)
    other = solve_tiers(problem, rival_s=found.prediction.objective)
    is_merged = found.prediction.objective <= other.prediction.objective
    best = found if is_merged else other
    return merged if is_merged else problem, replace(best, bound=min(found.bound, other.bound))


def _can_merge(merged: TierProblem) -> bool:
    """Several nodes of several ranks, and a limit on total bytes that the merged requests of all rows keep."""
    topology = merged.topology
    if topology.nodes == 1 or topology.ranks_per_node == 1:
        return False
    counts = sum(float(count_bytes(phase, topology).sum()) for phase in merged.routing.lookup_phases)
    per_rank = float(merged.global_bytes.sum()) + counts * len(merged.groups)
    return per_rank * topology.world_size <= merged.total_limit
