"""Why a plan is as it is: one paragraph per decision, with the figures that it was made from."""

from __future__ import annotations

from recmill.artifacts import ShardPlan
from recmill.sizes import format_bytes


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
