"""How the run was set up: the plan, the allocation, the configuration, the environment; and what is missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import recmill
from recmill.report.drawing.blocks import (
    Block,
    Cell,
    Chart,
    Details,
    Facts,
    Note,
    Section,
    Table,
    heading,
    same_parts,
    text_cells,
)
from recmill.report.drawing.charts import Axis, Bar, bar_chart
from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run, in_order, mapping, number, records
from recmill.report.units import DASH, format_count, format_named, readable_name

PACKAGES = ("torch", "torchrec", "duckdb", "ibis-framework", "pyarrow", "kfp", "mlflow")


def plan_section(runs: Sequence[Run]) -> Section:
    blocks: list[Block] = []
    for run, labels in same_parts(runs, "plan"):
        blocks += [*heading(labels), *plan_blocks(run)]
    for run, labels in same_parts(runs, "allocation"):
        blocks += [*heading(labels), *allocation_blocks(run)]
    for part, file in (("plan", "plan/plan.json"), ("allocation", "allocation/allocation.json")):
        blocks += [Note(text=f"{run.label} has no {file}.") for run in runs if part not in run.parts]
    return Section(id="plan", title="Plan and allocation", blocks=blocks)


def plan_blocks(run: Run) -> list[Block]:
    """One row a tier, and a table in one piece is one tier."""
    plan = run.part("plan")
    entries = [
        (name, tier) for name, entry in mapping(plan.get("tables")).items() for tier in table_tiers(mapping(entry))
    ]
    shown = {key: None for _, tier in entries for key, value in tier.items() if is_plain(value)}
    keys = sorted(shown, key=lambda key: TIER_KEYS.index(key) if key in TIER_KEYS else len(TIER_KEYS))
    rows = [[Cell(text=name), *(value_cell(key, tier.get(key)) for key in keys)] for name, tier in entries]
    numeric = frozenset(
        column + 1 for column, key in enumerate(keys) if any(number(tier.get(key)) is not None for _, tier in entries)
    )
    columns = ("Table", *(readable_name(key) for key in keys))
    table = Table(title="Where the tables live", columns=columns, rows=rows, numeric=numeric)
    facts = {key: plan[key] for key in PLAN_KEYS if key in plan}
    facts |= mapping(plan.get("topology"))
    named = {
        readable_name(key): format_named(key, value) for key, value in facts.items() if value not in (None, {}, [])
    }
    return [table, Facts(title="How it was planned", pairs=named)]


PLAN_KEYS = ("solver", "objective", "bound", "memory_budget_bytes", "batch_size", "rank_bytes")
TIER_KEYS = ("kind", "sharding", "collection", "ranks", "num_rows", "dim", "bytes")


def table_tiers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tiers of a table, each with what is said of the table as a whole; a table without tiers is one piece."""
    whole = {key: value for key, value in table.items() if key not in ("tiers", "shards")}
    ranks = sorted({rank for shard in records(table.get("shards")) if (rank := number(shard.get("rank"))) is not None})
    if ranks:
        whole["ranks"] = ", ".join(format_count(rank) for rank in ranks)
    return [whole | dict(tier) for tier in records(table.get("tiers"))] or [whole]


def is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) or (isinstance(value, list) and len(value) <= 8)


def value_cell(key: str, value: Any) -> Cell:
    return Cell(text=format_named(key, value), sort=number(value))


def allocation_blocks(run: Run) -> list[Block]:
    allocation = run.part("allocation")
    stages = {
        name: count
        for name, value in in_order(mapping(allocation.get("stages"))).items()
        if (count := number(value)) is not None
    }
    bars = [Bar(name=name, values=[count], text=format_count(count)) for name, count in stages.items()]
    svg = bar_chart(
        bars,
        title="Workers by stage",
        description="How many workers each ingestion stage was given.",
        legend=[Legend(name="workers", colour=1)],
        axis=Axis(name="workers", format=format_count, high=max([4.0, *stages.values()])),
    )
    facts = {key: value for key, value in allocation.items() if number(value) is not None and key != "format_version"}
    baseline = {
        f"baseline {key}": value
        for key, value in mapping(allocation.get("baseline")).items()
        if number(value) is not None
    }
    named = {readable_name(key): format_named(key, value) for key, value in (facts | baseline).items()}
    return [
        Chart(title="Workers by ingestion stage", svg=svg),
        Facts(title="Measured while tuning", pairs=named, is_wide=False),
    ]


def config_section(runs: Sequence[Run]) -> Section:
    """Settings of the training and arguments of the pipeline."""
    training = [mapping(run.part("training").get("config")) for run in runs]
    pipeline = [mapping(run.part("run").get("arguments")) for run in runs]
    blocks = [*settings_blocks(runs, training, "training"), *settings_blocks(runs, pipeline, "pipeline")]
    missing: list[Block] = [Note(text="No run holds a configuration.")]
    return Section(id="config", title="Configuration", blocks=blocks or missing)


def settings_blocks(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]], what: str) -> list[Block]:
    """With several runs first the settings that differ, because they are what is compared."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    if not keys:
        return []
    differing = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    blocks: list[Block] = []
    if differing:
        rows = [text_cells([key, *(setting(config, key) for config in configs)]) for key in differing]
        columns = ["Setting", *(run.label for run in runs)]
        blocks.append(Table(title=f"Where the {what}s differ", columns=columns, rows=rows, is_sortable=False))
    same = {key: setting(configs[0], key) for key in keys if key not in differing}
    shared = ", the same in all runs" if len(runs) > 1 else ""
    if same:
        blocks.append(Details(summary=f"Settings of the {what}{shared} ({len(same)})", blocks=[Facts(pairs=same)]))
    return blocks


def setting(config: Mapping[str, Any], key: str) -> str:
    """A setting as it is typed after --set: no thousands separators, no units."""
    value = config.get(key)
    if isinstance(value, bool):
        return "true" if value else "false"
    return DASH if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def environment_section(runs: Sequence[Run]) -> Section:
    blocks: list[Block] = []
    for run in runs:
        recorded = mapping(run.part("run").get("environment")) or mapping(run.part("training").get("environment"))
        if recorded:
            named = {str(key): format_named("", value) for key, value in recorded.items()}
            blocks.append(Facts(title=f"Recorded by {run.label}", pairs=named))
    blocks.append(Facts(title="Where this page was made", pairs=page_environment()))
    identity = [identity_row(run) for run in runs]
    columns = ("Run", "Folder", "Data", "Pipeline run", "MLflow run")
    blocks.append(Table(title="Where it came from", columns=columns, rows=identity, is_sortable=False))
    return Section(id="environment", title="Environment", blocks=blocks)


def page_environment() -> dict[str, str]:
    """Versions as installed here; read from package metadata, because importing torch takes seconds."""
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
    blocks: list[Block] = [
        Note(text="Throughput and memory were measured on one machine and once; repeat before you publish them.")
    ]
    if rows:
        blocks.append(Table(title="What is missing", columns=("Run", "What"), rows=rows, is_sortable=False))
    else:
        blocks.append(Note(text="Nothing is missing: every part of every run was found."))
    return Section(id="notes", title="Notes", blocks=blocks)
