"""From the linear program to whole rows: rounding, the exact cost of a placement, and a bound that proves it good."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from recmill.planning.costs import (
    KINDS,
    NUM_LANES,
    PHASE_NAMES,
    PHASES,
    REMAP_BYTES_PER_MOVED_ROW,
    STATE_BYTES_PER_ROW,
    WEIGHT_BYTES,
    WHOLE_PHASES,
    count_bytes,
    phase_latency,
    phase_seconds,
    remap_bytes,
    row_bytes,
)
from recmill.planning.linear_program import LinearSolution, solve_linear
from recmill.planning.tier_bound import lower_bound
from recmill.planning.tier_problem import (
    Decision,
    Segment,
    TierProblem,
    table_memory,
    whole_rank_bytes,
)

# C = classes of rows, P = lanes (phase and level), K = kinds of tiers
GOOD_GAP = 0.001
POLISH_ROWS = 20_000  # of all tables: with more of them one row matters too little to look for it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rows of every segment, most read first: replicated, then node, the rest global; whole tables by their rank."""

    rows: np.ndarray  # int [segments, 2]
    whole: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a placement costs in a step, computed from the classes of rows and not from the linear program."""

    table_bytes: np.ndarray  # [tables, K, P] sent by a rank, tables kept whole left out
    count_bytes: np.ndarray  # [P] of messages that say how long others are
    lane_bytes: np.ndarray  # [P] at the largest rank
    phase_seconds: dict[str, float]  # latency left out
    latency_seconds: float
    move_seconds: float  # of moving rows from an older plan, shared out over steps
    total_bytes: float  # over all ranks
    rank_memory: np.ndarray  # [ranks] bytes

    @property
    def seconds(self) -> float:
        return sum(self.phase_seconds.values()) + self.latency_seconds

    @property
    def objective(self) -> float:
        return self.seconds + self.move_seconds


@dataclass(frozen=True, kw_only=True)
class Solved:
    placement: Placement
    prediction: Prediction
    bound: float

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return max(self.prediction.objective - self.bound, 0.0) / self.bound if self.bound > 0 else 0.0


def segment_bytes(problem: TierProblem, segment: Segment, rows: np.ndarray) -> np.ndarray:
    """[K, P] bytes a rank sends for a segment with so many replicated and node rows."""
    edges = np.cumsum([0, rows[0], rows[1], segment.num_rows - rows[0] - rows[1]])
    stops = np.cumsum(segment.rows_C)
    starts = stops - segment.rows_C
    sent = np.zeros((len(KINDS), NUM_LANES))
    dim = problem.tables[segment.table].dim
    for k, kind in enumerate(KINDS):
        inside = np.clip(np.minimum(stops, edges[k + 1]) - np.maximum(starts, edges[k]), 0, None)
        touched = np.flatnonzero(inside)
        if len(touched):
            costs = row_bytes(kind, segment.reads_C[touched], dim, problem.topology)
            sent[k] = costs @ inside[touched]
    return sent


def rank_memory(problem: TierProblem, placement: Placement) -> np.ndarray:
    """[ranks] bytes: rows with optimiser state by the owners' rule, whole tables, and remaps."""
    world, per_node = problem.topology.world_size, problem.topology.ranks_per_node
    rows = table_rows(problem, placement)
    held = np.zeros(world)
    ranks = np.arange(world)
    for t, table in enumerate(problem.tables):
        row = table.dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW
        if t in placement.whole:
            held[placement.whole[t]] += table_memory(table)
            continue
        spread = table.num_rows - int(rows[t].sum())
        held += row * _striped(spread, world, ranks)
        held += row * (rows[t, 0] + _striped(int(rows[t, 1]), per_node, ranks % per_node))
        if rows[t].sum():
            held += remap_bytes(table.num_rows) + REMAP_BYTES_PER_MOVED_ROW * float(rows[t].sum())
    return held


def _striped(num_rows: int, ways: int, position: np.ndarray) -> np.ndarray:
    """How many of `num_rows` rows lie at each position when row i goes to position i % ways."""
    return num_rows // ways + (position < num_rows % ways)


def predict(problem: TierProblem, placement: Placement) -> Prediction:
    """The exact cost of a placement."""
    table_bytes = np.zeros((len(problem.tables), len(KINDS), NUM_LANES))
    moved = 0.0
    for segment, rows in zip(problem.segments, placement.rows, strict=True):
        if segment.table in placement.whole:
            continue
        table_bytes[segment.table] += segment_bytes(problem, segment, rows)
        split = np.array([rows[0], rows[1], segment.num_rows - rows.sum()])
        moved += float(split @ np.array(segment.move_seconds))
    by_rank = whole_rank_bytes(problem, placement.whole)
    latency, counts_P = overhead(problem, placement)
    lane_bytes = table_bytes.sum(axis=(0, 1)) + by_rank.max(axis=0) + counts_P
    average, _ = problem.whole_bytes
    per_rank = float(table_bytes.sum() + counts_P.sum()) + float(average[list(placement.whole)].sum())
    return Prediction(
        table_bytes=table_bytes,
        count_bytes=counts_P,
        lane_bytes=lane_bytes,
        phase_seconds=phase_seconds(lane_bytes, problem.seconds_per_byte),
        latency_seconds=latency,
        move_seconds=moved,
        total_bytes=per_rank * problem.topology.world_size,
        rank_memory=rank_memory(problem, placement),
    )


def solve_tiers(problem: TierProblem, *, time_limit_s: float = 20.0) -> Solved:
    """The best placement found, and the bound that says how good it is.

    Rows of a bucket can be shared out, so the linear program decides them; whether a table is kept whole and whether a
    group has copies at all is branched on, the widest open bound first, until the bound is met within GOOD_GAP or
    `time_limit_s` of CPU time are used.
    """
    problem.check_feasible()
    started = time.process_time()
    best: Solved | None = None
    nodes: list[tuple[float, int, dict[Decision, bool], LinearSolution]] = []
    closed, number = np.inf, 0  # the least bound of what needs no further branching

    def explore(decided: dict[Decision, bool]) -> None:
        nonlocal best, number
        relaxed = solve_linear(problem, decided=decided)
        bound = lower_bound(problem, relaxed, decided)
        if best is None or bound < best.prediction.objective * (1 - GOOD_GAP):
            found = _round(problem, relaxed, decided)
            if best is None or found.prediction.objective < best.prediction.objective:
                best = found
        number += 1
        heapq.heappush(nodes, (bound, number, decided, relaxed))

    explore({})
    first_s = time.process_time() - started
    while nodes and time.process_time() - started + 2 * first_s < time_limit_s:
        bound, _, decided, relaxed = heapq.heappop(nodes)
        assert best is not None
        undecided = _open_decision(problem, relaxed, decided, best.prediction.objective)
        if undecided is None or bound >= best.prediction.objective * (1 - GOOD_GAP):
            closed = min(closed, bound)
            continue
        explore({**decided, undecided: False})
        explore({**decided, undecided: True})
    assert best is not None
    bound = min([closed, *(node[0] for node in nodes), best.prediction.objective])
    return replace(best, bound=bound)


def _open_decision(
    problem: TierProblem, relaxed: LinearSolution, decided: Mapping[Decision, bool], objective: float
) -> Decision | None:
    """What a relaxed solution leaves open and matters: a group's latency, or a table that is whole in part."""
    rows = np.zeros((len(problem.tables), 2))
    for segment, placed in zip(problem.segments, relaxed.rows, strict=True):
        rows[segment.table] += placed
    costs = {
        "replicated": problem.latency("reduce", "spread"),
        "copies": problem.latency("exchange"),
    }
    for g, tables in enumerate(problem.groups):
        used = {"replicated": bool(rows[tables, 0].sum() >= 1), "copies": bool(rows[tables].sum() >= 1)}
        for flag, seconds in costs.items():
            is_small = seconds * len(problem.groups) < GOOD_GAP * objective
            if used[flag] and not is_small and (flag, g) not in decided:
                return flag, g
    partly = [t for t in problem.candidates if t not in decided and 1e-3 < relaxed.whole[t] < 1 - 1e-3]
    return max(partly, key=lambda t: min(relaxed.whole[t], 1 - relaxed.whole[t]), default=None)


def _round(problem: TierProblem, relaxed: LinearSolution, decided: Mapping[Decision, bool]) -> Solved:
    """The best placement of whole rows near a relaxed one."""
    groups: dict[Decision, bool] = {key: value for key, value in decided.items() if isinstance(key, tuple)}
    chosen = [t for t in problem.candidates if relaxed.whole[t] >= 0.5]
    found = []
    whole = place_whole(problem, chosen)
    for choice in [whole, {}] if whole else [{}]:
        solution = solve_linear(problem, whole=choice, decided=groups) if problem.candidates else relaxed
        placement = round_rows(problem, solution, choice)
        prediction = predict(problem, placement)
        rounded = Solved(
            placement=placement, prediction=prediction, bound=solution.seconds + prediction.latency_seconds
        )
        if sum(table.num_rows for table in problem.tables) <= POLISH_ROWS and rounded.gap > GOOD_GAP:
            rounded = polish(problem, rounded)
        found.append(rounded)
    return min(found, key=lambda solved: solved.prediction.objective)


def place_whole(problem: TierProblem, tables: list[int]) -> dict[int, int]:
    """Ranks for whole tables, by bytes sent and held; a table that no rank has memory left for is not among them."""
    _, owner = problem.whole_bytes
    world = problem.topology.world_size
    seconds = {t: float(owner[t] @ problem.seconds_per_byte) for t in tables}
    weight = {
        t: seconds[t] / max(sum(seconds.values()), 1e-12)
        + table_memory(problem.tables[t]) / max(sum(table_memory(problem.tables[o]) for o in tables), 1)
        for t in tables
    }
    load, held = np.zeros(world), np.zeros(world)
    # What the other tables need on every rank at least.
    others = sum(problem.global_memory(table) for t, table in enumerate(problem.tables) if t not in tables)
    placed: dict[int, int] = {}
    for t in sorted(tables, key=lambda t: (-weight[t], t)):
        need = table_memory(problem.tables[t])
        fits = np.flatnonzero(held + need + others <= problem.memory_budget_bytes)
        if not len(fits):
            others += problem.global_memory(problem.tables[t])
            continue
        rank = int(fits[np.argmin(load[fits])])
        placed[t] = rank
        load[rank] += weight[t]
        held[rank] += need
    if (held + others).max() > problem.memory_budget_bytes:
        return {}
    return placed


def round_rows(problem: TierProblem, solution: LinearSolution, whole: dict[int, int]) -> Placement:
    """Whole rows, within memory and the limit on total bytes: shares are cut down to rows, then trimmed if need be."""
    rows = np.floor(solution.rows + 1e-6).astype(np.int64)
    for s, segment in enumerate(problem.segments):
        if segment.table in whole:
            rows[s] = 0
        elif rows[s].sum() > segment.num_rows:
            rows[s, 1] = segment.num_rows - rows[s, 0]
    placement = Placement(rows=rows, whole=whole)
    shrink = 0
    while not is_allowed(problem, placement) and rows.any():
        # One more row of every segment at first, then doubling: striping rounds up by at most a row a table.
        cut = 1 << shrink
        shrink += 1
        take = np.minimum(rows[:, 1], cut)
        rows = np.stack([rows[:, 0] - np.minimum(rows[:, 0], cut - take), rows[:, 1] - take], axis=1)
        placement = Placement(rows=rows, whole=whole)
    return placement


def overhead(problem: TierProblem, placement: Placement) -> tuple[float, np.ndarray]:
    """(seconds of latency, [P] bytes of counts) of the phases that run, group by group."""
    rows = table_rows(problem, placement)
    used: list[str] = []
    for tables in problem.groups:
        tiered = [t for t in tables if t not in placement.whole]
        used += ["ids", "vectors", "gradients"] if tiered else []
        used += ["reduce", "spread"] if rows[tiered, 0].any() else []
        used += ["exchange"] if rows[tiered].any() else []
    used += [phase.name for phase in WHOLE_PHASES] if placement.whole else []
    phases = [PHASES[PHASE_NAMES.index(name)] for name in used]
    counts = sum((count_bytes(phase, problem.topology) for phase in phases), np.zeros(NUM_LANES))
    return sum(phase_latency(phase, problem.topology) for phase in phases), counts


def table_rows(problem: TierProblem, placement: Placement) -> np.ndarray:
    """[tables, 2] replicated and node rows, segments added up."""
    rows = np.zeros((len(problem.tables), 2), np.int64)
    for segment, placed in zip(problem.segments, placement.rows, strict=True):
        rows[segment.table] += placed
    return rows


def is_allowed(problem: TierProblem, placement: Placement) -> bool:
    """Within the memory budget on every rank, and within the limit on total bytes."""
    if rank_memory(problem, placement).max() > problem.memory_budget_bytes:
        return False
    if not np.isfinite(problem.total_limit):
        return True
    return predict(problem, placement).total_bytes <= problem.total_limit * (1 + 1e-9)


def polish(problem: TierProblem, solved: Solved) -> Solved:
    """Try more and fewer rows in every segment, in halving steps, and keep what lowers the seconds."""
    largest = max(segment.num_rows for segment in problem.segments)
    step = 1 << int(np.log2(max(largest // 64, 1)))
    best = solved
    while step:
        improved = False
        for s, segment in enumerate(problem.segments):
            if segment.table in best.placement.whole:
                continue
            for change in ((step, 0), (0, step), (-step, 0), (0, -step), (step, -step), (-step, step)):
                rows = best.placement.rows.copy()
                rows[s] += change
                if rows[s].min() < 0 or rows[s].sum() > segment.num_rows:
                    continue
                trial = Placement(rows=rows, whole=best.placement.whole)
                if rank_memory(problem, trial).max() > problem.memory_budget_bytes:
                    continue
                found = predict(problem, trial)
                is_better = found.objective < best.prediction.objective * (1 - 1e-9)
                if is_better and found.total_bytes <= problem.total_limit * (1 + 1e-9):
                    best, improved = replace(best, placement=trial, prediction=found), True
        if best.gap <= GOOD_GAP:
            break
        step = step if improved else step // 2
    return best
