"""Why a plan is as it is: a paragraph per decision and per table, in numbers that an engineer can check."""

from __future__ import annotations

import numpy as np

from recmill.artifacts import ShardPlan
from recmill.planning.tiers.costs import KINDS, WEIGHT_BYTES, held_bytes, row_memory
from recmill.planning.tiers.entries import TablePlacement, binding_seconds, placements
from recmill.planning.tiers.problem import TierProblem, table_bytes
from recmill.planning.tiers.solution import Solved, table_rows
from recmill.sizes import format_bytes

# C = classes of rows, P = lanes (phase and level)


def explain_plan(plan: ShardPlan) -> tuple[str, ...]:
    """Data, memory, rows, hot batches, shared parameters, ingestion and the prediction, where the plan has them."""
    told = (_data, _memory, _rows, _hot, _shared, _ingest, _step)
    return tuple(text for tell in told if (text := tell(plan)))


def _data(plan: ShardPlan) -> str:
    if plan.dedup is None or not plan.dedup.features:
        return ""
    chosen = {name: entry for name, entry in plan.dedup.features.items() if entry.is_deduplicated}
    text = f"Data: store it as `{plan.dedup.layout}`: {plan.dedup.why}."
    if not chosen:
        return f"{text} In the order of the profiled data, no feature repeats enough inside a batch to be deduplicated."
    named = ", ".join(f"{name} ({entry.factor:.1f}x)" for name, entry in list(chosen.items())[:5])
    more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
    return f"{text} In a batch, each distinct list is trained once for {named}{more}."


def _memory(plan: ShardPlan) -> str:
    if not plan.rank_bytes:
        return ""
    largest, ranks = max(plan.rank_bytes), len(plan.rank_bytes)
    return (
        f"Memory: rows, optimiser state and lookup indexes take {format_bytes(largest)} per rank, "
        f"{largest / plan.memory_budget_bytes:.0%} of the budget of {format_bytes(plan.memory_budget_bytes)}, on "
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}."
    )


def _rows(plan: ShardPlan) -> str:
    if plan.strategy == "torchrec":
        return "Rows: placed by TorchRec's planner, as whole tables or column ranges."
    counts: dict[str, int] = {}
    for table in plan.tables.values():
        for tier in table.tiers:
            counts[tier.kind] = counts.get(tier.kind, 0) + tier.num_rows
    total = sum(counts.values()) or 1
    named = ", ".join(f"{number:,} {kind} ({number / total:.1%})" for kind, number in counts.items() if number)
    text = f"Rows: {named}."
    if plan.prediction:
        text += (
            f" Communication then takes {plan.prediction.seconds * 1e3:.2f} ms per step instead of "
            f"{plan.prediction.row_wise_dedup.seconds * 1e3:.2f} ms with every row spread over all ranks"
        )
        text += f"; no plan takes less than {plan.bound * 1e3:.2f} ms." if plan.bound else "."
    if plan.merges_nodes:
        text += " The ids and gradients of a node are merged before they cross to another one."
    return text


def _hot(plan: ShardPlan) -> str:
    if plan.hot_set is None:
        return "Hot batches: no hot set was requested (--hot-budget)."
    verdict, held = "on" if plan.hot_set.pays else "off", format_bytes(plan.hot_set.bytes)
    return f"Hot batches: {verdict}, with {held} of hot rows per rank; {plan.hot_set.reason}."


def _shared(plan: ShardPlan) -> str:
    if plan.shared is None:
        return "Shared parameters: none; every table keeps its own rows."
    tables = list(plan.shared.tables)
    return (
        f"Shared parameters: {len(tables)} tables share one array of {format_bytes(plan.shared.array_bytes)}: "
        f"{', '.join(tables[:5])}{', ...' if len(tables) > 5 else ''}."
    )


def _ingest(plan: ShardPlan) -> str:
    if plan.ingest is None:
        return ""
    workers = ", ".join(f"{stage} {count}" for stage, count in plan.ingest.workers.items())
    return f"Ingestion: start with {workers} workers per rank: {plan.ingest.why}."


def _step(plan: ShardPlan) -> str:
    if not plan.predicted_bytes or plan.objective is None:
        return ""
    return (
        f"Prediction: rows take {format_bytes(plan.predicted_bytes)} per step over all ranks and "
        f"{plan.objective * 1e3:.2f} ms on the slowest rank, without dense gradients. The report compares this with "
        "the measurement."
    )


def explain_tables(problem: TierProblem, solved: Solved) -> dict[str, str]:
    """A few sentences per table: how it is read, what every alternative sends, and what decided the last row."""
    seconds_P = binding_seconds(problem, solved.prediction)
    reasons = {}
    for t, (name, own) in enumerate(placements(problem, solved).items()):
        told = [_reading(problem, t), _alternatives(problem, t), _choice(problem, t, own)]
        reasons[name] = " ".join([*told, *_marginal(problem, solved, t, own, seconds_P)])
    return reasons


def _reading(problem: TierProblem, t: int) -> str:
    table = problem.tables[t]
    distinct = float(-np.expm1(-table.reads_C) @ table.rows_C)
    return (
        f"{table.num_rows:,} rows of {table.dim} ({format_bytes(table_bytes(table))} with optimiser state); a rank "
        f"looks up {table.ids_per_rank:,.0f} ids per step, {distinct:,.0f} distinct."
    )


def _alternatives(problem: TierProblem, t: int) -> str:
    """Bytes that a rank sends per step under each placement of the whole table."""
    table, topology = problem.tables[t], problem.topology
    plain = table.ids_per_rank * (8 + 2 * table.dim * WEIGHT_BYTES) * (1 - 1 / topology.world_size)
    sent = {"row-wise without dedup": plain}
    for kind in reversed(KINDS):
        if kind != "node" or topology.nodes > 1:
            found = problem.row_bytes(kind, table.reads_C, table.dim) @ table.rows_C
            sent[f"all {kind}"] = float(found.sum())
    _, owner = problem.whole_bytes
    named = ", ".join(f"{name} {format_bytes(value)}" for name, value in sent.items())
    return f"Bytes per rank: {named}; if kept whole, its owner would serve {format_bytes(float(owner[t].sum()))}."


def _choice(problem: TierProblem, t: int, placed: TablePlacement) -> str:
    rows = placed.rows
    if placed.rank is not None:
        return f"Kept whole on rank {placed.rank}: pooled vectors are fewer than its distinct rows."
    parts = [f"{number:,} {kind}" for kind, number in zip(KINDS, rows, strict=True) if number]
    if not rows[0] and not rows[1]:
        return "Every row is global."
    reads = _reads_at(problem, t, rows[0] + rows[1] - 1)
    return (
        f"Rows: {', '.join(parts)}; the last row outside the global tier is read {reads:.2g} times per rank and step."
    )


def _reads_at(problem: TierProblem, t: int, position: int) -> float:
    """Reads of the row at a place in the order of falling reads."""
    table = problem.tables[t]
    place = int(np.searchsorted(np.cumsum(table.rows_C), position, "right"))
    return float(table.reads_C[min(place, len(table.rows_C) - 1)])


def _marginal(problem: TierProblem, solved: Solved, t: int, placed: TablePlacement, seconds_P: np.ndarray) -> list[str]:
    """What moving the next row would save, and what prevents it."""
    rows = placed.rows
    if placed.rank is not None or not rows[2]:
        return []
    table, topology = problem.tables[t], problem.topology
    reads = np.array([_reads_at(problem, t, rows[0] + rows[1])])
    if not reads[0]:
        return ["The next row is never read."]
    costs = {kind: problem.row_bytes(kind, reads, table.dim)[:, 0] for kind in KINDS}
    saved = {kind: float(seconds_P @ (costs["global"] - costs[kind])) for kind in ("node", "replicated")}
    best = max(saved, key=lambda kind: saved[kind])
    if saved[best] <= 0:
        return [
            f"The next row ({reads[0]:.2g} reads) would slow the step down in any other tier: "
            "its gradient has to reach every copy."
        ]
    more = row_memory(best, table.dim, topology) - row_memory("global", table.dim, topology)
    left = problem.memory_budget_bytes - float(solved.prediction.rank_memory.max())
    extra = float(costs[best].sum() - costs["global"].sum()) * topology.world_size
    reason = f"memory: {format_bytes(max(left, 0))} of the budget is left" if left < 2 * held_bytes(table.dim) else ""
    group = next(tables for tables in problem.groups if t in tables)
    if not table_rows(problem, solved.placement)[group].any():
        latency = problem.latency("exchange", *(("reduce", "spread") if best == "replicated" else ()))
        reason = f"latency: synchronising copies takes {latency * 1e6:.3g} us more, for any number of them"
    if not reason and extra > 0 and np.isfinite(problem.total_limit):
        reason = f"total bytes: it adds {extra:.0f} B over all ranks, and the total is limited"
    reason = reason or "that other rows save more for the same memory or bytes"
    return [
        f"The next row ({reads[0]:.2g} reads) as {best} would save {saved[best] * 1e9:.3g} ns per step for "
        f"{more:.0f} B per rank; what prevents it is {reason}."
    ]
