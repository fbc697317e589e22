"""Seconds that no placement can beat, whatever the rounding: the linear program's prices, applied a class at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recmill.planning.costs import KINDS, PHASES, remap_bytes, row_bytes, row_memory
from recmill.planning.linear_program import LinearSolution
from recmill.planning.tier_problem import GLOBAL, NODE, Decision, TierProblem, table_memory
from recmill.planning.topology import LEVELS

# C = classes of rows, P = lanes (phase and level)


def lower_bound(problem: TierProblem, solution: LinearSolution, decided: Mapping[Decision, bool]) -> float:
    """Seconds that no placement within the limits (and as `decided`) can beat.

    Bytes, memory and total bytes are paid at the prices of the linear program instead of being limited. Every row then
    takes the tier that is cheapest, every table the better of tiers and one rank, every group of tables the better of
    having copies, with the latency of keeping them equal, and having none. Whatever the prices are, this is below the
    optimum (Lagrange); with the program's own prices it is close. The program's buckets do not enter.
    """
    per_byte = _phase_prices(solution) * problem.seconds_per_byte
    budget, world = problem.memory_budget_bytes, problem.topology.world_size
    memory = max(solution.memory_price, 0.0) / budget
    limit = problem.total_limit / world
    total = max(solution.total_price, 0.0) / limit if np.isfinite(limit) and limit > 0 else 0.0
    tiered = _cheapest(problem, per_byte + total, memory)
    kept = _kept_whole(problem, solution, per_byte + total)
    for t in range(len(problem.tables)):
        if decided.get(t, False):
            tiered[t] = kept[t]
        elif t not in decided:
            tiered[t] = np.minimum(tiered[t], kept[t])
    seconds = sum(_group_seconds(problem, g, tables, tiered, decided) for g, tables in enumerate(problem.groups))
    seconds += problem.whole_latency_s if any(value for key, value in decided.items() if isinstance(key, int)) else 0.0
    return seconds - memory * budget - (total * limit if total else 0.0)


def _cheapest(problem: TierProblem, per_byte: np.ndarray, memory: float) -> np.ndarray:
    """[tables, 3] seconds with every row global; with node copies where they pay; with any tier where it pays."""
    found = np.zeros((len(problem.tables), 3))
    for segment in problem.segments:
        table = problem.tables[segment.table]
        costs = np.array(
            [
                per_byte @ row_bytes(kind, segment.reads_C, table.dim, problem.topology)
                + memory * row_memory(kind, table.dim, problem.topology)
                + segment.move_seconds[k]
                for k, kind in enumerate(KINDS)
            ]
        )
        choices = [costs[GLOBAL], costs[NODE:].min(axis=0), costs.min(axis=0)]
        found[segment.table] += [choice @ segment.rows_C for choice in choices]
    found[:, 1:] += memory * np.array([remap_bytes(table.num_rows) for table in problem.tables])[:, None]
    return np.minimum.accumulate(found, axis=1)


def _kept_whole(problem: TierProblem, solution: LinearSolution, per_byte: np.ndarray) -> np.ndarray:
    """[tables] seconds of a table that one rank keeps; infinite where that is no choice."""
    average, owner = problem.whole_bytes
    owner_prices = np.clip(solution.owner_prices, 0, None) * problem.seconds_per_byte
    kept = np.full(len(problem.tables), np.inf)
    for t in problem.candidates:
        held = max(solution.whole_memory_prices[t], 0.0) / problem.memory_budget_bytes
        kept[t] = float(per_byte @ average[t]) + float(owner_prices[t] @ owner[t])
        kept[t] += held * table_memory(problem.tables[t])
    return kept


def _group_seconds(
    problem: TierProblem, g: int, tables: list[int], tiered: np.ndarray, decided: Mapping[Decision, bool]
) -> float:
    exchange, local = problem.latency("exchange"), problem.latency("reduce", "spread")
    latency = np.array([0.0, exchange, exchange + local])
    choices = dict(enumerate((tiered[tables].sum(axis=0) + latency).tolist()))
    copies, replicated = decided.get(("copies", g)), decided.get(("replicated", g))
    if copies is not None:
        choices = {kind: value for kind, value in choices.items() if (kind > 0) == copies}
    if replicated is not None:
        choices = {kind: value for kind, value in choices.items() if (kind == len(KINDS) - 1) == replicated}
    if not choices:  # replicated rows without copies
        return float("inf")
    is_tiered = any(t not in problem.candidates or not decided.get(t, True) for t in tables)
    return float(min(choices.values())) + (problem.lookup_latency_s if is_tiered else 0.0)


def _phase_prices(solution: LinearSolution) -> np.ndarray:
    """[P] prices of a second on every lane, scaled so that those of a phase (owners' included) add up to at most 1."""
    lanes = np.clip(solution.lane_prices, 0, None)
    used = lanes + np.clip(solution.owner_prices, 0, None).sum(axis=0)
    of_phase = np.repeat(used.reshape(len(PHASES), len(LEVELS)).sum(axis=1), len(LEVELS))
    scaled: np.ndarray = lanes / np.maximum(of_phase, 1.0)
    return scaled
