"""Markdown tables of what a step made. Kubeflow's UI shows them in a narrow column: few columns, short plain titles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from recmill.artifacts import AccessProfile, Dataset, ShardPlan
from recmill.data.checks.findings import LogFindings
from recmill.sizes import format_bytes

if TYPE_CHECKING:
    from recmill.data.log import RawLog

MAX_COLUMNS = 5
MAX_ROWS = 50

Row = Mapping[str, str]  # column title: cell


def write_table(output: Any, title: str, rows: Iterable[Row]) -> None:
    """Fill a KFP Markdown artifact with one table; of a long one, with its first rows."""
    write_tables(output, {title: rows})


def write_tables(output: Any, tables: Mapping[str, Iterable[Row]]) -> None:
    """Fill a KFP Markdown artifact with tables by title."""
    text = "\n\n".join("\n".join(_table_lines(title, rows)) for title, rows in tables.items())
    with open(output.path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def _table_lines(title: str, rows: Iterable[Row]) -> list[str]:
    listed = list(rows)
    columns = list(listed[0]) if listed else []
    assert len(columns) <= MAX_COLUMNS and not any("_" in column for column in columns), columns  # noqa: PT018
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += [f"| {' | '.join(row.values())} |" for row in islice(listed, MAX_ROWS)]
    if len(listed) > MAX_ROWS:
        lines += ["", f"and {len(listed) - MAX_ROWS:,} more"]
    return lines


def log_tables(log: RawLog, num_values: Mapping[str, int]) -> dict[str, list[dict[str, str]]]:
    """A prepared log by title: its size and labels, its tables, and what the checks found.

    `num_values` are the values that the vocabulary of a table knows; a table of hashed values has none.
    """
    info = log.schema.info
    found = LogFindings.from_json(info["checks"])
    size = {
        "rows": f"{log.num_rows:,}",
        "positive": f"{info['base_rate']:.1%}",
        "sessions": f"{info['num_sessions']:,}",
        "events": f"{info['num_events']:,}",
        "size": format_bytes(log.num_bytes),
    }
    tables = [
        {
            "table": _name(table.name),
            "rows": f"{table.num_rows:,}",
            "width": str(table.dim),
            "vocabulary": f"{num_values[table.name]:,}" if table.name in num_values else "-",
        }
        for table in log.schema.tables
    ]
    findings = [
        {"level": finding.level, "check": finding.check, "finding": _cell(finding.message)} for finding in found.found
    ]
    nothing = [{"level": "-", "check": "all", "finding": "nothing found"}]
    return {"Prepared log": [size], "Tables": tables, found.summary().capitalize(): findings or nothing}


def part_rows(dataset: Dataset) -> list[dict[str, str]]:
    """The splits of a dataset, and all of them."""
    splits = {split: dataset.split_parts(split) for split in dataset.splits}
    return [
        {
            "split": split,
            "rows": f"{sum(part.num_rows for part in parts):,}",
            "sessions": f"{sum(part.num_sessions for part in parts):,}",
            "files": str(len(parts)),
            "size": format_bytes(sum(part.bytes for part in parts)),
        }
        for split, parts in (splits | {"all": dataset.parts}).items()
    ]


def access_rows(profile: AccessProfile) -> list[dict[str, str]]:
    """The tables of a profile: how many rows, how many are read, and how uneven the reads are."""
    return [
        {
            "table": _name(name),
            "rows": f"{table.num_rows:,}",
            "rows read": f"{table.num_distinct:,}",
            "reads": f"{table.num_accesses:,}",
            "top 1%": _share(table.top_share.get("0.01")),
        }
        for name, table in profile.tables.items()
    ]


def tier_rows(plan: ShardPlan) -> list[dict[str, str]]:
    """The tiers of every table of a plan: where its rows live, and the bytes that they cost."""
    return [
        {
            "table": _name(name),
            "kept": tier.kind.replace("_", " "),
            "rows": f"{tier.num_rows:,}",
            "memory": format_bytes(tier.bytes),
            "sent per step": format_bytes(tier.predicted_bytes_per_step),
        }
        for name, table in plan.tables.items()
        for tier in table.tiers
    ]


def comparison_rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """The runs of a comparison (`result_rows`): speed, quality and size."""
    return [
        {
            "run": name.replace("_", " "),
            "samples/s": f"{row['samples_per_s']:,.0f}",
            "speed": f"{row['speedup']:.2f}x",
            "AUC": "-" if row["auc"] is None else f"{row['auc']:.4f}",
            "memory": format_bytes(row["peak_memory_bytes"]),
        }
        for name, row in results.items()
    ]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("_", "\\_")


def _name(text: str) -> str:
    """A name as code: underscores outside of code may become italics."""
    return f"`{text.replace('|', '/')}`"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
