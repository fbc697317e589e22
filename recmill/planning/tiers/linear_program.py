"""The tier problem as a linear program over buckets of rows, solved by HiGHS.

Rows of a segment (a table, or the part of it that starts from one tier of an older plan) form buckets of similar
counts; a linear program decides which share of every bucket goes to which tier. Everything is scaled: seconds by those
of the plan with every row global, memory by the budget, total bytes by those of the global plan.

    minimise    sum of the phases' seconds t_p
    for every phase and level   bytes(x, y) / bandwidth <= t_p          (the slowest rank; both levels work at once)
    memory(x, y, u) <= budget       total bytes(x, y) <= limit
    x_replicated + x_node <= u              the rest of a bucket is global; u pays for the table's remap
    u + y <= 1                              a table kept whole (y) has no tiers
    owner's bytes * y <= t_p                a whole table is on one rank

Only phases that run pay their latency; whether a group of tables has copies is decided by branching.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recmill.artifacts import InputError
from recmill.artifacts.topology import LEVELS
from recmill.planning.tiers.costs import (
    COPY_PHASES,
    KINDS,
    NUM_LANES,
    PHASE_NAMES,
    PHASES,
    WHOLE_PHASES,
    count_bytes,
    held_bytes,
    lane,
    remap_bytes,
    row_memory,
)
from recmill.planning.tiers.problem import (
    GLOBAL,
    REPLICATED,
    Branch,
    Segment,
    TierProblem,
    table_bytes,
    whole_rank_bytes,
)

# C = classes of rows, G = buckets of all segments, P = lanes (phase and level), K = kinds of tiers
MAX_VARIABLES = 40_000  # of the linear program: 1,000 tables get 20 buckets each, which costs 0.3% and solves in 10 s
MAX_BUCKETS = 128
WHOLE_LANES = [lane(phase.name, level) for phase in WHOLE_PHASES for level in LEVELS]


@dataclass(frozen=True, kw_only=True)
class LinearSolution:
    """The result of HiGHS: rows of every segment by tier (fractional), tables kept whole, and prices."""

    rows: np.ndarray  # [segments, 2]: replicated, node
    whole: np.ndarray  # [tables] share of a table that is kept whole
    seconds: float
    phase_seconds: np.ndarray  # [phases]
    lane_prices: np.ndarray  # [P], each phase's add up to 1
    owner_prices: np.ndarray  # [tables, P]
    memory_price: float  # seconds for all of the budget
    whole_memory_prices: np.ndarray  # [tables] seconds for all of the budget, paid by the rank that keeps a table whole
    total_price: float  # seconds for all of the total


def solve_linear(
    problem: TierProblem, *, whole: Mapping[int, int] | None = None, branch: Branch | None = None
) -> LinearSolution:
    """The linear program's optimum in a branch; `whole` says which tables are kept whole, and on which rank."""
    return _LinearProgram(problem, whole, branch or Branch()).solve()


def bucket_starts(segment: Segment, max_buckets: int) -> np.ndarray:
    """Where buckets start among the classes: classes of similar reads share one, rows never read have their own."""
    reads = segment.reads_C
    if len(reads) <= max_buckets:
        return np.arange(len(reads))
    read = reads[reads > 0]
    level = np.log(read[0] / read)
    # half of the buckets by reads (the hot end is steep), half by rows (most of the traffic is where the rows are)
    by_reads = np.floor(level / max(level[-1], 1e-9) * (max_buckets // 2))
    cumulative = np.log1p(np.cumsum(segment.rows_C[: len(read)]))
    by_rows = np.floor(cumulative / cumulative[-1] * (max_buckets // 2 - 1))
    is_new = np.concatenate([[True], (np.diff(by_reads) != 0) | (np.diff(by_rows) != 0)])
    starts = np.flatnonzero(is_new)
    return starts if len(read) == len(reads) else np.append(starts, len(read))


class _LinearProgram:
    """The scaled matrix of a tier problem."""

    def __init__(self, problem: TierProblem, whole: Mapping[int, int] | None, branch: Branch) -> None:
        self.problem, self.whole, self.branch = problem, whole, branch
        self.candidates = problem.candidates if whole is None else []
        fixed = set(whole or {})
        self.segments = [s for s, segment in enumerate(problem.segments) if segment.table not in fixed]
        self._gather_buckets()
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.limits: list[float] = []
        self._lay_out_columns()

    def _gather_buckets(self) -> None:
        problem = self.problem
        max_buckets = int(np.clip(MAX_VARIABLES // 2 // max(len(self.segments), 1), 8, MAX_BUCKETS))
        costs, rows, owners = [], [], []
        for s in self.segments:
            segment = problem.segments[s]
            starts = bucket_starts(segment, max_buckets)
            costs.append(np.add.reduceat(problem.class_bytes[s] * segment.rows_C, starts, axis=2))
            rows.append(np.add.reduceat(segment.rows_C, starts))
            owners.append(np.full(len(starts), s))
        self.bytes_KPG = np.concatenate(costs, axis=2) if costs else np.zeros((len(KINDS), NUM_LANES, 0))
        self.rows_G = np.concatenate(rows).astype(float) if rows else np.zeros(0)
        self.segment_G = np.concatenate(owners) if owners else np.zeros(0, int)
        self.table_G = np.array([problem.segments[s].table for s in self.segment_G], int)
        memory = np.array(
            [[row_memory(kind, table.dim, problem.topology) for table in problem.tables] for kind in KINDS]
        )
        self.memory_KG = memory[:, self.table_G] * self.rows_G
        moves = np.array([segment.move_seconds for segment in problem.segments]).reshape(-1, len(KINDS))
        self.move_KG = (moves[self.segment_G] * self.rows_G[:, None]).T

    def _lay_out_columns(self) -> None:
        problem = self.problem
        seconds_KPG = self.bytes_KPG * problem.seconds_per_byte[None, :, None]
        self.scale_s = max(float(seconds_KPG[GLOBAL].sum()), 1e-12)
        self.gain_KPG = (seconds_KPG[:GLOBAL] - seconds_KPG[GLOBAL]) / self.scale_s
        # A tier that saves no byte anywhere only costs memory.
        helps_KG = (self.gain_KPG < -1e-15).any(axis=1) & (self.rows_G > 0)
        is_move_cheaper = self.move_KG[:GLOBAL] < self.move_KG[GLOBAL]
        self.choice_K, self.choice_G = np.nonzero((helps_KG | is_move_cheaper) & self._allowed())
        num_x, num_y, num_u = len(self.choice_G), len(self.candidates), len(problem.tables)
        self.y0, self.u0 = num_x, num_x + num_y
        self.t0 = self.u0 + num_u
        self.evenly = self.t0 + len(PHASES)
        self.num_columns = self.evenly + 1

    def _allowed(self) -> np.ndarray:
        """[2, G] whether the decisions allow a bucket to be replicated, or kept once per node."""
        allowed = np.ones((GLOBAL, len(self.rows_G)), bool)
        for g, tables in enumerate(self.problem.groups):
            inside = np.isin(self.table_G, tables)
            allowed[REPLICATED, inside] &= self.branch.decided.get(("replicated", g), True)
            allowed[:, inside] &= self.branch.decided.get(("copies", g), True)
        return allowed

    def add(self, columns: np.ndarray, values: np.ndarray, limit: float) -> None:
        """One inequality: sum(values * x[columns]) <= limit."""
        kept = np.flatnonzero(values)
        self.add_all(np.zeros(len(kept), int), columns[kept], values[kept], num_rows=1, limit=limit)

    def add_all(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, *, num_rows: int, limit: float
    ) -> None:
        """Many inequalities with the same limit; `rows` counts from the first of them."""
        self.entries.append((rows + len(self.limits), columns, values))
        self.limits.extend([limit] * num_rows)

    def _add_lanes(self) -> None:
        problem, scale = self.problem, self.scale_s
        average, owner = problem.whole_bytes
        x_columns, y_columns = np.arange(self.y0), np.arange(self.y0, self.u0)
        fixed_P = whole_rank_bytes(problem, self.whole or {}).max(axis=0)  # largest rank's
        base_P = (self.bytes_KPG[GLOBAL].sum(axis=1) + fixed_P) * problem.seconds_per_byte / scale
        for p in range(NUM_LANES):
            per_byte = problem.seconds_per_byte[p] / scale
            x = self.gain_KPG[self.choice_K, p, self.choice_G]
            y = (average[self.candidates, p] - problem.global_bytes[self.candidates, p]) * per_byte
            t = self.t0 + p // len(LEVELS)
            columns = np.concatenate([x_columns, y_columns, [t]])
            self.add(columns, np.concatenate([x, y, [-1.0]]), -float(base_P[p]))
        self.first_cut = len(self.limits)
        for p in WHOLE_LANES:
            shares = owner[self.candidates, p] * problem.seconds_per_byte[p] / scale
            times = np.full(len(shares), self.t0 + p // len(LEVELS))
            rows = np.tile(np.arange(len(shares)), 2)
            columns, values = np.concatenate([y_columns, times]), np.concatenate([shares, np.full(len(shares), -1.0)])
            self.add_all(rows, columns, values, num_rows=len(shares), limit=0.0)

    def _add_budgets(self) -> None:
        problem = self.problem
        budget, world = problem.memory_budget_bytes, problem.topology.world_size
        y_columns, u_columns = np.arange(self.y0, self.u0), np.arange(self.u0, self.t0)
        x = self.memory_KG[self.choice_K, self.choice_G] - self.memory_KG[GLOBAL, self.choice_G]
        whole = np.array([table_bytes(problem.tables[t]) for t in self.candidates])
        spread = np.array([self.memory_KG[GLOBAL, self.table_G == t].sum() for t in self.candidates])
        u = np.array([remap_bytes(table.num_rows) for table in problem.tables])
        base = float(self.memory_KG[GLOBAL].sum()) + max(self._fixed_whole_memory(), default=0.0)
        # `evenly` is what every rank holds of the tables in tiers; whole tables add to it, on one rank each.
        columns = np.concatenate([np.arange(self.y0), y_columns, u_columns, [self.evenly]])
        self.memory_row = len(self.limits)
        # Rows are assigned one by one: each tier of a table may give the first rank one row more than its share.
        uneven = sum(2 * held_bytes(table.dim) for table in problem.tables)
        base += min(uneven, max(budget - base, 0.0) / 2)
        self.add(columns, np.concatenate([x, -spread, u, [-budget]]) / budget, -base / budget)
        self.add(np.append(y_columns, self.evenly), np.append(whole / budget / world, 1.0), 1.0)
        for column, held in zip(y_columns, whole / budget, strict=True):
            self.add(np.array([column, self.evenly]), np.array([held, 1.0]), 1.0)
        self.total_row = len(self.limits)
        if np.isfinite(problem.total_limit):
            scale = problem.total_limit / world or 1.0
            total_KG = self.bytes_KPG.sum(axis=1)
            average, _ = problem.whole_bytes
            x = total_KG[self.choice_K, self.choice_G] - total_KG[GLOBAL, self.choice_G]
            y = average[self.candidates].sum(axis=1) - problem.global_bytes[self.candidates].sum(axis=1)
            base = float(total_KG[GLOBAL].sum()) + float(average[list(self.whole or {})].sum())
            used = (*problem.routing.lookup_phases, *COPY_PHASES, *WHOLE_PHASES)
            lengths = sum(float(count_bytes(phase, problem.topology).sum()) for phase in used) * len(problem.groups)
            base += min(lengths, max(problem.total_limit / world - base, 0.0) / 2)
            columns = np.concatenate([np.arange(self.y0), y_columns])
            self.add(columns, np.concatenate([x, y]) / scale, (problem.total_limit / world - base) / scale)

    def _fixed_whole_memory(self) -> list[float]:
        held = [0.0] * self.problem.topology.world_size
        for table, rank in (self.whole or {}).items():
            held[rank] += table_bytes(self.problem.tables[table])
        return held

    def _add_shares(self) -> None:
        """Shares of a bucket add up to u at most, u and y to 1."""
        buckets, bucket_of_x = np.unique(self.choice_G, return_inverse=True)
        rows = np.concatenate([bucket_of_x, np.arange(len(buckets))])
        columns = np.concatenate([np.arange(self.y0), self.u0 + self.table_G[buckets]])
        values = np.concatenate([np.ones(self.y0), np.full(len(buckets), -1.0)])
        self.add_all(rows, columns, values, num_rows=len(buckets), limit=0.0)
        for position, table in enumerate(self.candidates):
            self.add(np.array([self.y0 + position, self.u0 + table]), np.ones(2), 1.0)

    def solve(self) -> LinearSolution:
        from scipy.optimize import linprog  # takes half a second, which ranks that only read plans save
        from scipy.sparse import coo_matrix

        problem = self.problem
        self._add_lanes()
        self._add_budgets()
        self._add_shares()
        cost = np.zeros(self.num_columns)
        cost[: self.y0] = (
            self.move_KG[self.choice_K, self.choice_G] - self.move_KG[GLOBAL, self.choice_G]
        ) / self.scale_s
        cost[self.t0 : self.evenly] = 1.0
        bounds = np.zeros((self.num_columns, 2))
        bounds[:, 1] = 1.0
        bounds[self.t0 :, 1] = np.inf
        for position, table in enumerate(self.candidates):
            if table in self.branch.decided:
                bounds[self.y0 + position] = float(self.branch.decided[table])
        for phase, seconds in self.branch.floors.items():
            bounds[self.t0 + PHASE_NAMES.index(phase), 0] = seconds / self.scale_s
        rows, columns, values = (np.concatenate([entry[i] for entry in self.entries]) for i in range(3))
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self.limits), self.num_columns)).tocsr()
        found: Any = linprog(cost, A_ub=matrix, b_ub=np.array(self.limits), bounds=bounds, method="highs")
        if found.x is None:
            raise InputError(
                f"HiGHS finds no placement within {problem.memory_budget_bytes:,} B per rank: {found.message}"
            )
        return self._solution(found.x, np.maximum(-found.ineqlin.marginals, 0.0), float(found.fun))

    def _solution(self, x: np.ndarray, prices: np.ndarray, value: float) -> LinearSolution:
        problem = self.problem
        placed = np.zeros((len(problem.segments), 2))
        np.add.at(
            placed,
            (self.segment_G[self.choice_G], self.choice_K),
            np.clip(x[: self.y0], 0, 1) * self.rows_G[self.choice_G],
        )
        whole = np.zeros(len(problem.tables))
        whole[self.candidates] = x[self.y0 : self.u0]
        whole[list(self.whole or {})] = 1.0
        owner_prices = np.zeros((len(problem.tables), NUM_LANES))
        if self.candidates:
            cuts = prices[self.first_cut : self.memory_row].reshape(len(WHOLE_LANES), len(self.candidates))
            owner_prices[np.ix_(self.candidates, WHOLE_LANES)] = cuts.T
        has_total = np.isfinite(problem.total_limit)
        whole_memory_prices = np.zeros(len(problem.tables))
        shared = prices[self.memory_row + 1] / problem.topology.world_size
        whole_memory_prices[self.candidates] = (prices[self.memory_row + 2 : self.total_row] + shared) * self.scale_s
        return LinearSolution(
            rows=placed,
            whole=whole,
            seconds=value * self.scale_s,
            phase_seconds=x[self.t0 : self.evenly] * self.scale_s,
            lane_prices=prices[:NUM_LANES],
            owner_prices=owner_prices,
            memory_price=float(prices[self.memory_row + 1 : self.total_row].sum()) * self.scale_s,
            whole_memory_prices=whole_memory_prices,
            total_price=float(prices[self.total_row]) * self.scale_s if has_total else 0.0,
        )
