"""Why a table landed where it did, in numbers an engineer can check."""

from __future__ import annotations

import numpy as np

from recmill.planning.tiers.costs import KINDS, STATE_BYTES_PER_ROW, WEIGHT_BYTES, row_bytes, row_memory
from recmill.planning.tiers.entries import binding_seconds, placements
from recmill.planning.tiers.problem import TierProblem, table_memory
from recmill.planning.tiers.solution import Solved, table_rows
from recmill.sizes import format_bytes

# C = classes of rows, P = lanes (phase and level)


def explain_tables(problem: TierProblem, solved: Solved) -> dict[str, str]:
    """A few sentences a table: how it is read, what every alternative sends, and what decided the last row."""
    seconds_P = binding_seconds(problem, solved.prediction)
    placed = placements(problem, solved)
    return {
        table.name: " ".join(
            (
                _reading(problem, t),
                _alternatives(problem, t),
                _choice(problem, t, placed[table.name].rows, placed[table.name].rank),
                *_marginal(problem, solved, t, placed[table.name].rows, placed[table.name].rank, seconds_P),
            )
        )
        for t, table in enumerate(problem.tables)
    }


def _reading(problem: TierProblem, t: int) -> str:
    table = problem.tables[t]
    distinct = float(-np.expm1(-table.reads_C) @ table.rows_C)
    return (
        f"{table.num_rows:,} rows of {table.dim} ({format_bytes(table_memory(table))} with optimiser state); a rank "
        f"looks up {table.ids_per_rank:,.0f} ids a step, {distinct:,.0f} distinct."
    )


def _alternatives(problem: TierProblem, t: int) -> str:
    """Bytes a rank sends in a step under each placement of the whole table."""
    table, topology = problem.tables[t], problem.topology
    plain = table.ids_per_rank * (8 + 2 * table.dim * WEIGHT_BYTES) * (1 - 1 / topology.world_size)
    sent = {"row-wise without dedup": plain}
    for kind in reversed(KINDS):
        if kind != "node" or topology.nodes > 1:
            found = row_bytes(kind, table.reads_C, table.dim, topology) @ table.rows_C
            sent[f"all {kind}"] = float(found.sum())
    _, owner = problem.whole_bytes
    named = ", ".join(f"{name} {format_bytes(value)}" for name, value in sent.items())
    return f"A rank would send, {named}; kept whole its owner would serve {format_bytes(float(owner[t].sum()))}."


def _choice(problem: TierProblem, t: int, rows: tuple[int, int, int], rank: int | None) -> str:
    if rank is not None:
        return f"Kept whole on rank {rank}: pooled vectors are fewer than its distinct rows."
    parts = [f"{number:,} {kind}" for kind, number in zip(KINDS, rows, strict=True) if number]
    if not rows[0] and not rows[1]:
        return "Every row is global."
    reads = _reads_at(problem, t, rows[0] + rows[1] - 1)
    return (
        f"Rows: {', '.join(parts)}; the last row that left the global tier is read {reads:.2g} times a rank and step."
    )


def _reads_at(problem: TierProblem, t: int, position: int) -> float:
    """Reads of the row at a place in the order of falling reads."""
    table = problem.tables[t]
    place = int(np.searchsorted(np.cumsum(table.rows_C), position, "right"))
    return float(table.reads_C[min(place, len(table.rows_C) - 1)])


def _marginal(
    problem: TierProblem,
    solved: Solved,
    t: int,
    rows: tuple[int, int, int],
    rank: int | None,
    seconds_P: np.ndarray,
) -> list[str]:
    """What the next row would have brought, and why it did not come."""
    if rank is not None or not rows[2]:
        return []
    table, topology = problem.tables[t], problem.topology
    reads = np.array([_reads_at(problem, t, rows[0] + rows[1])])
    if not reads[0]:
        return ["The next row is never read."]
    costs = {kind: row_bytes(kind, reads, table.dim, topology)[:, 0] for kind in KINDS}
    saved = {kind: float(seconds_P @ (costs["global"] - costs[kind])) for kind in ("node", "replicated")}
    best = max(saved, key=lambda kind: saved[kind])
    if saved[best] <= 0:
        return [
            f"The next row ({reads[0]:.2g} reads) would slow the step down in any other tier: "
            f"its gradient has to reach every copy."
        ]
    more = row_memory(best, table.dim, topology) - row_memory("global", table.dim, topology)
    left = problem.memory_budget_bytes - float(solved.prediction.rank_memory.max())
    held = table.dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW
    extra = float(costs[best].sum() - costs["global"].sum()) * topology.world_size
    reason = f"memory: {format_bytes(max(left, 0))} of the budget is left" if left < held * 2 else ""
    group = next(tables for tables in problem.groups if t in tables)
    if not table_rows(problem, solved.placement)[group].any():
        latency = problem.latency("exchange", *(("reduce", "spread") if best == "replicated" else ()))
        reason = f"latency: keeping copies equal takes {latency * 1e6:.3g} us more, whatever their number"
    if not reason and extra > 0 and np.isfinite(problem.total_limit):
        reason = f"total bytes: it adds {extra:.0f} B over all ranks, and their sum is limited"
    reason = reason or "what its table already pays for: others bring more for the same memory or bytes"
    return [
        f"The next row ({reads[0]:.2g} reads) as {best} would save {saved[best] * 1e9:.3g} ns a step for {more:.0f} B "
        f"a rank; what stops it is {reason}."
    ]
