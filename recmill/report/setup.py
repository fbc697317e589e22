"""The setup of the run: plan, allocation, configuration and environment; and what is missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import recmill
from recmill.report.drawing.blocks import (
    Cell,
    Details,
    Facts,
    Note,
    PageTable,
    Section,
    missing_notes,
    part_blocks,
    text_cells,
)
from recmill.report.drawing.charts import Axis, Bar, PageBlock, bar_block
from recmill.report.runs import Run, in_order, mapping, number, records
from recmill.report.units import DASH, format_count, format_named, readable_name

PACKAGES = ("torch", "torchrec", "duckdb", "ibis-framework", "pyarrow", "kfp", "mlflow")
PLAN_KEYS = ("solver", "objective", "bound", "memory_budget_bytes", "batch_size", "rank_bytes")
TIER_KEYS = ("kind", "sharding", "collection", "ranks", "num_rows", "dim", "bytes")


def plan_section(runs: Sequence[Run]) -> Section:
    blocks = [
        *part_blocks(runs, "plan", plan_blocks),
        *part_blocks(runs, "allocation", allocation_blocks),
        *missing_notes(runs, "plan", "allocation"),
    ]
    return Section(id="plan", title="Plan and allocation", blocks=blocks)


def plan_blocks(run: Run) -> list[PageBlock]:
    """One row per tier; a table in one piece is one tier."""
    plan = run.part("plan")
    entries = [
        (name, tier) for name, entry in mapping(plan.get("tables")).items() for tier in table_tiers(mapping(entry))
    ]
    shown = {key: None for _, tier in entries for key, value in tier.items() if is_plain(value)}
    keys = sorted(shown, key=lambda key: TIER_KEYS.index(key) if key in TIER_KEYS else len(TIER_KEYS))
    rows = [
        [Cell(text=name), *(Cell(text=format_named(key, tier.get(key)), sort=number(tier.get(key))) for key in keys)]
        for name, tier in entries
    ]
    numeric = frozenset(
        column + 1 for column, key in enumerate(keys) if any(number(tier.get(key)) is not None for _, tier in entries)
    )
    columns = ("Table", *(readable_name(key) for key in keys))
    table = PageTable(title="Where the tables live", columns=columns, rows=rows, numeric=numeric)
    facts = {key: plan[key] for key in PLAN_KEYS if key in plan}
    facts |= mapping(plan.get("topology"))
    known = {key: value for key, value in facts.items() if value not in (None, {}, [])}
    return [table, Facts(title="How it was planned", pairs=named(known))]


def named(values: Mapping[str, Any]) -> dict[str, str]:
    return {readable_name(key): format_named(key, value) for key, value in values.items()}


def table_tiers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tiers of a table, each with the table's own values; a table without tiers is one piece."""
    whole = {key: value for key, value in table.items() if key not in ("tiers", "shards")}
    ranks = sorted({rank for shard in records(table.get("shards")) if (rank := number(shard.get("rank"))) is not None})
    if ranks:
        whole["ranks"] = ", ".join(format_count(rank) for rank in ranks)
    return [whole | dict(tier) for tier in records(table.get("tiers"))] or [whole]


def is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) or (isinstance(value, list) and len(value) <= 8)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: found for key, value in values.items() if (found := number(value)) is not None}


def allocation_blocks(run: Run) -> list[PageBlock]:
    allocation = run.part("allocation")
    stages = numbers_of(in_order(mapping(allocation.get("stages"))))
    chart = bar_block(
        [Bar(name=name, values=[count], text=format_count(count)) for name, count in stages.items()],
        title="Workers per ingestion stage",
        description="The number of workers of each ingestion stage.",
        axis=Axis(name="workers", format=format_count, high=max([4.0, *stages.values()])),
    )
    facts = {key: value for key, value in numbers_of(allocation).items() if key != "format_version"}
    facts |= {f"baseline {key}": value for key, value in numbers_of(mapping(allocation.get("baseline"))).items()}
    return [chart, Facts(title="Measured while tuning", pairs=named(facts), is_wide=False)]


def config_section(runs: Sequence[Run]) -> Section:
    """Settings of the training and arguments of the pipeline."""
    training = [mapping(run.part("training").get("config")) for run in runs]
    pipeline = [mapping(run.part("run").get("arguments")) for run in runs]
    blocks = [
        *settings_blocks(runs, training, "Training settings"),
        *settings_blocks(runs, pipeline, "Pipeline arguments"),
    ]
    missing: list[PageBlock] = [Note(text="No run has a configuration.")]
    return Section(id="config", title="Configuration", blocks=blocks or missing)


def settings_blocks(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]], title: str) -> list[PageBlock]:
    """With several runs, first the settings that differ, because they are what is compared."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    if not keys:
        return []
    differing = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    blocks: list[PageBlock] = []
    if differing:
        rows = [text_cells([key, *(setting(config, key) for config in configs)]) for key in differing]
        columns = ["Setting", *(run.label for run in runs)]
        blocks.append(PageTable(title=f"{title} that differ", columns=columns, rows=rows, is_sortable=False))
    same = {key: setting(configs[0], key) for key in keys if key not in differing}
    shared = " shared by all runs" if len(runs) > 1 else ""
    if same:
        blocks.append(Details(summary=f"{title}{shared} ({len(same)})", blocks=[Facts(pairs=same)]))
    return blocks


def setting(config: Mapping[str, Any], key: str) -> str:
    """A setting as typed after --set: no thousands separators, no units."""
    value = config.get(key)
    if isinstance(value, bool):
        return "true" if value else "false"
    return DASH if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def environment_section(runs: Sequence[Run]) -> Section:
    blocks: list[PageBlock] = []
    for run in runs:
        recorded = mapping(run.part("run").get("environment")) or mapping(run.part("training").get("environment"))
        if recorded:
            pairs = {str(key): format_named("", value) for key, value in recorded.items()}
            blocks.append(Facts(title=f"Environment of {run.label}", pairs=pairs))
    blocks.append(Facts(title="Environment of this report", pairs=page_environment()))
    columns = ("Run", "Folder", "Data", "Pipeline run", "MLflow run")
    identity = [identity_row(run) for run in runs]
    blocks.append(PageTable(title="Provenance", columns=columns, rows=identity, is_sortable=False))
    return Section(id="environment", title="Environment", blocks=blocks)


def page_environment() -> dict[str, str]:
    """Installed versions, from package metadata because importing torch takes seconds."""
    found = {"recmill": recmill.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count())}


def identity_row(run: Run) -> list[Cell]:
    data = mapping(run.part("training").get("data")).get("content_hash") or run.part("dataset").get("content_hash")
    tracked = mapping(run.part("run").get("mlflow")).get("run_id")
    values = [run.label, run.path, str(data or DASH)[:19], run.part("run").get("pipeline_run_id"), tracked]
    return text_cells([str(value or DASH) for value in values])


def notes_section(runs: Sequence[Run]) -> Section:
    rows = [text_cells([run.label, sentence]) for run in runs for sentence in run.missing]
    blocks: list[PageBlock] = [
        Note(text="Throughput and memory were measured once, on one machine; repeat the run before you publish them.")
    ]
    if rows:
        blocks.append(PageTable(title="Missing parts", columns=("Run", "Missing"), rows=rows, is_sortable=False))
    else:
        blocks.append(Note(text="Nothing is missing: every part of every run was found."))
    return Section(id="notes", title="Notes", blocks=blocks)
