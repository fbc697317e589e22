"""A whole plan told as an engineer would: data, memory, rows, hot batches, shared parameters, ingestion, prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recmill.sizes import format_bytes


def explain_plan(body: Mapping[str, Any]) -> list[str]:
    """One paragraph a decision, each with the figures that it was made from."""
    told = (_data, _memory, _rows, _hot, _shared, _ingest, _step)
    return [text for tell in told if (text := tell(body))]


def _data(body: Mapping[str, Any]) -> str:
    dedup = body.get("dedup")
    if not dedup or not dedup["features"]:
        return ""
    chosen = {name: entry for name, entry in dedup["features"].items() if entry["is_deduplicated"]}
    text = f"Data: store it as `{dedup['layout']}`: {dedup['why']}."
    if not chosen:
        return f"{text} As the profiled data lies, no feature repeats enough inside a batch to be trained once."
    named = ", ".join(f"{name} ({entry['factor']:.1f}x)" for name, entry in list(chosen.items())[:5])
    more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
    return f"{text} In a batch each distinct list is trained once for {named}{more}."


def _memory(body: Mapping[str, Any]) -> str:
    if not body.get("rank_bytes"):
        return ""
    largest, budget = max(body["rank_bytes"]), body["memory_budget_bytes"]
    ranks = len(body["rank_bytes"])
    return (
        f"Memory: rows, optimiser state and finding rows take {format_bytes(largest)} of the {format_bytes(budget)} a "
        f"rank may spend ({largest / budget:.0%}), on {ranks} {'rank' if ranks == 1 else 'ranks'}."
    )


def _rows(body: Mapping[str, Any]) -> str:
    if body["strategy"] == "torchrec":
        return "Rows: placed by TorchRec's planner, a table or a column range at a time."
    counts: dict[str, int] = {}
    for table in body["tables"].values():
        for tier in table["tiers"]:
            counts[tier["kind"]] = counts.get(tier["kind"], 0) + tier["num_rows"]
    total = sum(counts.values()) or 1
    named = ", ".join(f"{number:,} {kind} ({number / total:.1%})" for kind, number in counts.items() if number)
    text = f"Rows: {named}."
    if prediction := body.get("prediction"):
        baseline = prediction["row_wise_dedup"]
        text += (
            f" A step's rows then travel for {prediction['seconds'] * 1e3:.2f} ms instead of "
            f"{baseline['seconds'] * 1e3:.2f} ms with every row spread over all ranks"
        )
        text += f"; no plan takes less than {body['bound'] * 1e3:.2f} ms." if body.get("bound") else "."
    return text


def _hot(body: Mapping[str, Any]) -> str:
    hot = body.get("hot_set")
    if not hot:
        return "Hot batches: not asked for (--hot-budget)."
    verdict = "on" if hot["pays"] else "left off"
    return f"Hot batches: {verdict}, with {format_bytes(hot['bytes'])} of hot rows a rank; {hot['reason']}."


def _shared(body: Mapping[str, Any]) -> str:
    shared = body.get("shared")
    if not shared:
        return "Shared parameters: none; every table keeps rows of its own."
    return (
        f"Shared parameters: {len(shared['tables'])} tables live in one array of "
        f"{format_bytes(shared['array_bytes'])}: "
        f"{', '.join(list(shared['tables'])[:5])}{', ...' if len(shared['tables']) > 5 else ''}."
    )


def _ingest(body: Mapping[str, Any]) -> str:
    ingest = body.get("ingest")
    if not ingest:
        return ""
    workers = ", ".join(f"{stage} {count}" for stage, count in ingest["workers"].items())
    return f"Ingestion: start with {workers} workers a rank: {ingest['why']}."


def _step(body: Mapping[str, Any]) -> str:
    predicted = predicted_bytes(body)
    if not predicted:
        return ""
    return (
        f"Prediction: rows take {format_bytes(predicted)} a step over all ranks and {body['objective'] * 1e3:.2f} ms "
        "on the slowest; dense gradients come on top. The report sets it against what was measured."
    )


def predicted_bytes(body: Mapping[str, Any]) -> float:
    """Bytes a step that rows, their ids and gradients take over all ranks, without hot batches."""
    return float(
        sum(tier["predicted_bytes_per_step"] for table in body["tables"].values() for tier in table.get("tiers", ()))
    )
