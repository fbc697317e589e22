"""A lower bound on the seconds of any placement, from the linear program's prices, one class of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recmill.artifacts.topology import LEVELS
from recmill.planning.tiers.costs import KINDS, PHASE_NAMES, PHASES, remap_bytes, row_memory
from recmill.planning.tiers.linear_program import LinearSolution
from recmill.planning.tiers.problem import GLOBAL, NODE, Branch, Decision, TierProblem, table_bytes

# C = classes of rows, P = lanes (phase and level)


@dataclass(frozen=True, kw_only=True)
class TablePrices:
    """What tables cost in seconds when bytes and memory have the prices of a linear program."""

    tiered: np.ndarray  # [tables, 3] every row global; with node copies where they pay; with any tier where it pays
    kept: np.ndarray  # [tables] on one rank; infinite where not allowed
    gains: np.ndarray  # [tables] saved by keeping a table whole, before the time of its phases
    limits: float  # value of all allowed memory and bytes
    open_phases: np.ndarray  # [phases] share of a phase's seconds that no byte pays for


def lower_bound(problem: TierProblem, prices: TablePrices, branch: Branch) -> float:
    """Seconds that no placement of a branch can beat.

    Bytes, memory and total bytes have the prices of the linear program instead of limits. Every row then takes its
    cheapest tier, every table the better of tiers and one rank, and every group the better of having copies (with the
    latency of synchronising them) and having none. For any prices this is below the optimum (Lagrange); with the
    program's own prices it is close. The program's buckets are not used.
    """
    decided = branch.decided
    costs = prices.tiered.copy()
    for t in range(len(problem.tables)):
        if decided.get(t, False):
            costs[t] = prices.kept[t]
        elif t not in decided:
            costs[t] = np.minimum(costs[t], prices.kept[t])
    seconds = sum(_group_seconds(problem, g, tables, costs, decided) for g, tables in enumerate(problem.groups))
    for phase, floor in branch.floors.items():
        seconds += float(prices.open_phases[PHASE_NAMES.index(phase)]) * floor
    keeps_some = bool(branch.floors) or any(value for key, value in decided.items() if isinstance(key, int))
    return seconds + (problem.whole_latency_s if keeps_some else 0.0) - prices.limits


def price_tables(problem: TierProblem, solution: LinearSolution) -> TablePrices:
    """The cost of every table at the prices of a linear program, one class of rows at a time."""
    lanes, owners = _phase_prices(solution)
    per_byte = lanes * problem.seconds_per_byte
    budget, world = problem.memory_budget_bytes, problem.topology.world_size
    memory = max(solution.memory_price, 0.0) / budget
    limit = problem.total_limit / world
    total = max(solution.total_price, 0.0) / limit if np.isfinite(limit) and limit > 0 else 0.0
    tiered = _cheapest(problem, per_byte + total, memory)
    average, owner = problem.whole_bytes
    kept, gains = np.full(len(problem.tables), np.inf), np.zeros(len(problem.tables))
    for t in problem.candidates:
        held = max(solution.whole_memory_prices[t], 0.0) / budget * table_bytes(problem.tables[t])
        kept[t] = float((per_byte + total) @ average[t] + (owners[t] * problem.seconds_per_byte) @ owner[t]) + held
        gains[t] = tiered[t].min() - total * float(average[t].sum())
    used = (lanes + owners.sum(axis=0)).reshape(len(PHASES), len(LEVELS)).sum(axis=1)
    return TablePrices(
        tiered=tiered,
        kept=kept,
        gains=gains,
        limits=memory * budget + (total * limit if total else 0.0),
        open_phases=np.clip(1 - used, 0, None),
    )


def _cheapest(problem: TierProblem, per_byte: np.ndarray, memory: float) -> np.ndarray:
    """[tables, 3] seconds with every row global; with node copies where they pay; with any tier where it pays."""
    found = np.zeros((len(problem.tables), 3))
    for segment, bytes_KPC in zip(problem.segments, problem.class_bytes, strict=True):
        table = problem.tables[segment.table]
        held = np.array([row_memory(kind, table.dim, problem.topology) for kind in KINDS])
        costs = per_byte @ bytes_KPC + (memory * held + np.array(segment.move_seconds))[:, None]
        choices = [costs[GLOBAL], costs[NODE:].min(axis=0), costs.min(axis=0)]
        found[segment.table] += [choice @ segment.rows_C for choice in choices]
    found[:, 1:] += memory * np.array([remap_bytes(table.num_rows) for table in problem.tables])[:, None]
    return np.minimum.accumulate(found, axis=1)


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


def _phase_prices(solution: LinearSolution) -> tuple[np.ndarray, np.ndarray]:
    """([P], [tables, P]) prices of a second on every lane and at every owner; those of a phase add up to at most 1."""
    lanes, owners = np.clip(solution.lane_prices, 0, None), np.clip(solution.owner_prices, 0, None)
    used = (lanes + owners.sum(axis=0)).reshape(len(PHASES), len(LEVELS)).sum(axis=1)
    scale = 1 / np.maximum(np.repeat(used, len(LEVELS)), 1.0)
    return lanes * scale, owners * scale
