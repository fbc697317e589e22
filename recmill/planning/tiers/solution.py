"""Solves the tier problem: rounds the linear program to whole rows, computes exact costs, and proves a bound."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from recmill.artifacts import InputError
from recmill.planning.tiers.bound import lower_bound, price_tables
from recmill.planning.tiers.costs import (
    KINDS,
    NUM_LANES,
    PHASE_NAMES,
    PHASES,
    REMAP_BYTES_PER_MOVED_ROW,
    WHOLE_PHASES,
    count_bytes,
    held_bytes,
    phase_latency,
    phase_seconds,
    remap_bytes,
)
from recmill.planning.tiers.linear_program import LinearSolution, solve_linear
from recmill.planning.tiers.problem import Branch, Decision, TierProblem, table_bytes, whole_rank_bytes
from recmill.planning.tiers.whole_tables import place_whole

# C = classes of rows, P = lanes (phase and level), K = kinds of tiers
GOOD_GAP = 0.001
FAIR_GAP, PATIENCE = 0.02, 4  # a plan further above its bound is searched for that many times longer
POLISH_ROWS = 20_000  # with more rows over all tables, a single row matters too little to search for

# Tables kept whole, the most bytes that a rank sends and holds for them, and what is decided about copies. The other
# tables depend on nothing else; a search meets the same choice again and again, on ranks that are numbered differently.
Choice: TypeAlias = tuple[frozenset[int], tuple[float, ...], frozenset[tuple[Decision, bool]]]


@dataclass(frozen=True, kw_only=True)
class TierPlacement:
    """Rows of every segment, most read first: replicated, then node, the rest global; whole tables by their rank."""

    rows: np.ndarray  # int [segments, 2]
    whole: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a placement costs in a step, computed from the classes of rows and not from the linear program."""

    table_bytes: np.ndarray  # [tables, K, P] sent by a rank, without whole tables
    count_bytes: np.ndarray  # [P] of messages that announce lengths
    lane_bytes: np.ndarray  # [P] at the largest rank
    phase_seconds: dict[str, float]  # without latency
    latency_seconds: float
    move_seconds: float  # per step, of moving rows from an older plan
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
    placement: TierPlacement
    prediction: Prediction
    bound: float

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return max(self.prediction.objective - self.bound, 0.0) / self.bound if self.bound > 0 else 0.0


def segment_bytes(problem: TierProblem, s: int, rows: np.ndarray) -> np.ndarray:
    """[K, P] bytes that a rank sends for a segment with these numbers of replicated and node rows."""
    segment = problem.segments[s]
    edges = np.cumsum([0, rows[0], rows[1], segment.num_rows - rows[0] - rows[1]])
    stops = np.cumsum(segment.rows_C)
    starts = stops - segment.rows_C
    sent = np.zeros((len(KINDS), NUM_LANES))
    for k in range(len(KINDS)):
        inside = np.clip(np.minimum(stops, edges[k + 1]) - np.maximum(starts, edges[k]), 0, None)
        sent[k] = problem.class_bytes[s][k] @ inside
    return sent


def rank_memory(problem: TierProblem, placement: TierPlacement) -> np.ndarray:
    """[ranks] bytes: rows with optimiser state by the owners' rule, whole tables, and remaps."""
    world, per_node = problem.topology.world_size, problem.topology.ranks_per_node
    rows = table_rows(problem, placement)
    held = np.zeros(world)
    ranks = np.arange(world)
    for t, table in enumerate(problem.tables):
        row = held_bytes(table.dim)
        if t in placement.whole:
            held[placement.whole[t]] += table_bytes(table)
            continue
        spread = table.num_rows - int(rows[t].sum())
        held += row * _striped(spread, world, ranks)
        held += row * (rows[t, 0] + _striped(int(rows[t, 1]), per_node, ranks % per_node))
        if rows[t].sum():
            held += remap_bytes(table.num_rows) + REMAP_BYTES_PER_MOVED_ROW * float(rows[t].sum())
    return held


def _striped(num_rows: int, ways: int, position: np.ndarray) -> np.ndarray:
    """How many of `num_rows` rows are at each position when row i goes to position i % ways."""
    return num_rows // ways + (position < num_rows % ways)


def predict(problem: TierProblem, placement: TierPlacement) -> Prediction:
    """The exact cost of a placement."""
    table_bytes = np.zeros((len(problem.tables), len(KINDS), NUM_LANES))
    moved = 0.0
    for s, (segment, rows) in enumerate(zip(problem.segments, placement.rows, strict=True)):
        if segment.table in placement.whole:
            continue
        table_bytes[segment.table] += segment_bytes(problem, s, rows)
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


def solve_tiers(problem: TierProblem, *, time_limit_s: float = 30.0, rival_s: float = np.inf) -> Solved:
    """The best placement found, and the bound that says how good it is.

    A search that cannot end below `rival_s` stops early.

    The linear program decides how the rows of a bucket are divided. Whether a table is kept whole and whether a group
    has copies at all is decided by branching, lowest bound first, until the gap is below GOOD_GAP, or `time_limit_s` of
    CPU time are used and the gap is below FAIR_GAP.
    """
    problem.check_feasible()
    started = time.process_time()
    best: Solved | None = None
    nodes: list[tuple[float, int, Branch, LinearSolution]] = []
    closed, number = np.inf, 0  # the least bound of what needs no further branching
    known: dict[Choice, Solved] = {}

    def explore(branch: Branch) -> None:
        nonlocal best, number
        try:
            relaxed = solve_linear(problem, branch=branch)
        except InputError:
            if best is None:
                raise
            return  # tables that must be whole here do not fit together
        prices = price_tables(problem, relaxed)
        bound = lower_bound(problem, prices, branch)
        if best is None or bound < best.prediction.objective * (1 - GOOD_GAP):
            found = _round(problem, relaxed, branch, prices.gains, known, is_first=best is None)
            if best is None or found.prediction.objective < best.prediction.objective:
                best = found
        number += 1
        heapq.heappush(nodes, (bound, number, branch, relaxed))

    def limit_s() -> float:
        assert best is not None
        is_fair = min(closed, nodes[0][0]) >= best.prediction.objective * (1 - FAIR_GAP)
        return time_limit_s if is_fair else PATIENCE * time_limit_s

    explore(Branch())
    spent = time.process_time() - started
    expected = spent  # of the next two halves
    while nodes and nodes[0][0] < rival_s * (1 - GOOD_GAP) and spent + expected < limit_s():
        bound, _, branch, relaxed = heapq.heappop(nodes)
        assert best is not None
        halves = _halves(problem, relaxed, branch, best.prediction.objective)
        if not halves or bound >= best.prediction.objective * (1 - GOOD_GAP):
            closed = min(closed, bound)
            continue
        for half in halves:
            explore(half)
        before, spent = spent, time.process_time() - started
        expected = spent - before
    assert best is not None
    bound = min([closed, *(node[0] for node in nodes), best.prediction.objective])
    return replace(best, bound=bound)


def _halves(problem: TierProblem, relaxed: LinearSolution, branch: Branch, objective: float) -> list[Branch]:
    """The two halves of a branch, cut at its most important open decision; nothing if there is none.

    Latency is paid or not; the largest whole table is above or below a size; a table is whole or not.
    """
    by_latency = _halves_by_latency(problem, relaxed, branch, GOOD_GAP * objective)
    if by_latency:
        return by_latency
    partly = [t for t in problem.candidates if t not in branch.decided and 1e-3 < relaxed.whole[t] < 1 - 1e-3]
    if not partly:
        return []
    by_size = _halves_by_size(problem, relaxed, branch, partly, GOOD_GAP * objective)
    table = max(partly, key=lambda t: min(relaxed.whole[t], 1 - relaxed.whole[t]))
    return by_size or [branch.with_decided({table: value}) for value in (False, True)]


def _halves_by_latency(problem: TierProblem, relaxed: LinearSolution, branch: Branch, worth_s: float) -> list[Branch]:
    """Cut at an undecided latency: of whole tables, of copies, or of replicas."""
    candidates = problem.candidates
    keeps_some = bool(branch.floors) or any(branch.decided.get(t, False) for t in candidates)
    if relaxed.whole.max(initial=0.0) > 1e-3 and not keeps_some and problem.whole_latency_s >= worth_s:
        least = float(problem.owner_seconds[candidates, 0].min())
        none = branch.with_decided(dict.fromkeys(candidates, False))
        return [none, branch.with_floor(WHOLE_PHASES[0].name, least)]
    rows = table_rows(problem, relaxed)
    costs = {"replicated": problem.latency("reduce", "spread"), "copies": problem.latency("exchange")}
    for g, tables in enumerate(problem.groups):
        used = {"replicated": bool(rows[tables, 0].sum() >= 1), "copies": bool(rows[tables].sum() >= 1)}
        for flag, seconds in costs.items():
            is_small = seconds * len(problem.groups) < worth_s
            if used[flag] and not is_small and (flag, g) not in branch.decided:
                return [branch.with_decided({(flag, g): value}) for value in (False, True)]
    return []


def _halves_by_size(
    problem: TierProblem, relaxed: LinearSolution, branch: Branch, partly: list[int], worth_s: float
) -> list[Branch]:
    """Cut by the size of the largest whole table, where large tables are whole only in part.

    Deciding many such tables one by one makes no progress; the size of the largest one sets the time of the phase.
    """
    phases = [PHASE_NAMES.index(phase.name) for phase in WHOLE_PHASES]
    above = problem.owner_seconds[partly].max(axis=0) - relaxed.phase_seconds[phases]
    if above.max() < worth_s:
        return []
    position = int(np.argmax(above))
    sizes = problem.owner_seconds[:, position]
    middle = float(relaxed.phase_seconds[phases[position]] + above[position] / 2)
    larger = [t for t in problem.candidates if sizes[t] > middle]
    none_larger = branch.with_decided({t: False for t in larger if t not in branch.decided})
    return [none_larger, branch.with_floor(WHOLE_PHASES[position].name, float(sizes[larger].min()))]


def _round(
    problem: TierProblem,
    relaxed: LinearSolution,
    branch: Branch,
    gains: np.ndarray,
    known: dict[Choice, Solved],
    *,
    is_first: bool,
) -> Solved:
    """The best placement of whole rows near a relaxed one; `known` has those of earlier branches."""
    groups = Branch(decided={key: value for key, value in branch.decided.items() if isinstance(key, tuple)})
    whole = place_whole(problem, relaxed, gains)
    found = []
    for choice in [whole, {}] if whole and is_first else [whole]:
        key = _choice_key(problem, choice, groups)
        if key not in known:
            known[key] = _divide_rows(problem, relaxed, choice, groups)
        found.append(known[key])
    return min(found, key=lambda solved: solved.prediction.objective)


def _choice_key(problem: TierProblem, whole: dict[int, int], groups: Branch) -> Choice:
    held = np.zeros(problem.topology.world_size)
    np.add.at(held, list(whole.values()), [table_bytes(problem.tables[t]) for t in whole])
    most = (*whole_rank_bytes(problem, whole).max(axis=0).tolist(), float(held.max()))
    return frozenset(whole), most, frozenset(groups.decided.items())


def _divide_rows(problem: TierProblem, relaxed: LinearSolution, whole: dict[int, int], groups: Branch) -> Solved:
    """The best tiers of all other tables where these are kept whole."""
    solution = solve_linear(problem, whole=whole, branch=groups) if problem.candidates else relaxed
    found = _cut_to_rows(problem, solution, whole)
    idle = _idle_copies(problem, solution, whole)
    if not idle:
        return found
    without = solve_linear(problem, whole=whole, branch=groups.with_decided(idle))
    return min(found, _cut_to_rows(problem, without, whole), key=lambda solved: solved.prediction.objective)


def _idle_copies(problem: TierProblem, solution: LinearSolution, whole: dict[int, int]) -> dict[Decision, bool]:
    """Groups whose copies save less than the latency of synchronising them, which the linear program ignores."""
    tiered = price_tables(problem, solution).tiered
    rows = table_rows(problem, solution)
    exchange, local = problem.latency("exchange"), problem.latency("reduce", "spread")
    idle: dict[Decision, bool] = {}
    for g, tables in enumerate(problem.groups):
        own = [t for t in tables if t not in whole]
        best = int(np.argmin(tiered[own].sum(axis=0) + np.array([0.0, exchange, exchange + local])))
        if best == 0 and rows[own].sum() >= 1:
            idle["copies", g] = False
        elif best == 1 and rows[own, 0].sum() >= 1:
            idle["replicated", g] = False
    return idle


def _cut_to_rows(problem: TierProblem, solution: LinearSolution, whole: dict[int, int]) -> Solved:
    placement = round_rows(problem, solution, whole)
    prediction = predict(problem, placement)
    rounded = Solved(placement=placement, prediction=prediction, bound=solution.seconds + prediction.latency_seconds)
    if sum(table.num_rows for table in problem.tables) <= POLISH_ROWS and rounded.gap > GOOD_GAP:
        rounded = polish(problem, rounded)
    return rounded


def round_rows(problem: TierProblem, solution: LinearSolution, whole: dict[int, int]) -> TierPlacement:
    """Round shares down to whole rows, then remove rows until memory and total bytes are within their limits."""
    rows = np.floor(solution.rows + 1e-6).astype(np.int64)
    for s, segment in enumerate(problem.segments):
        if segment.table in whole:
            rows[s] = 0
        elif rows[s].sum() > segment.num_rows:
            rows[s, 1] = segment.num_rows - rows[s, 0]
    placement = TierPlacement(rows=rows, whole=whole)
    shrink = 0
    while not is_allowed(problem, placement) and rows.any():
        # Remove one row per segment, then twice as many: striping rounds up by at most one row per table.
        cut = 1 << shrink
        shrink += 1
        take = np.minimum(rows[:, 1], cut)
        rows = np.stack([rows[:, 0] - np.minimum(rows[:, 0], cut - take), rows[:, 1] - take], axis=1)
        placement = TierPlacement(rows=rows, whole=whole)
    return placement


def overhead(problem: TierProblem, placement: TierPlacement) -> tuple[float, np.ndarray]:
    """(seconds of latency, [P] bytes of counts) of the phases that run, group by group."""
    rows = table_rows(problem, placement)
    used: list[str] = []
    for tables in problem.groups:
        tiered = [t for t in tables if t not in placement.whole]
        used += [phase.name for phase in problem.routing.lookup_phases] if tiered else []
        used += ["reduce", "spread"] if rows[tiered, 0].any() else []
        used += ["exchange"] if rows[tiered].any() else []
    used += [phase.name for phase in WHOLE_PHASES] if placement.whole else []
    phases = [PHASES[PHASE_NAMES.index(name)] for name in used]
    counts = sum((count_bytes(phase, problem.topology) for phase in phases), np.zeros(NUM_LANES))
    return sum(phase_latency(phase, problem.topology) for phase in phases), counts


def table_rows(problem: TierProblem, placed: TierPlacement | LinearSolution) -> np.ndarray:
    """[tables, 2] replicated and node rows (of a linear program: in part), segments added up."""
    rows = np.zeros((len(problem.tables), 2), placed.rows.dtype)
    np.add.at(rows, [segment.table for segment in problem.segments], placed.rows)
    return rows


def is_allowed(problem: TierProblem, placement: TierPlacement) -> bool:
    """Within the memory budget on every rank, and within the limit on total bytes."""
    if rank_memory(problem, placement).max() > problem.memory_budget_bytes:
        return False
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
                trial = TierPlacement(rows=rows, whole=best.placement.whole)
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
