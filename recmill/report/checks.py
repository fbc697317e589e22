"""What the checks of a prepared log found: warnings with numbers and rows, and the events and label rates by day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from recmill.report.drawing.blocks import Card, Cards, Cell, Details, PageTable, Section, part_blocks
from recmill.report.drawing.charts import Axis, PageBlock, Series, line_block
from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run, mapping, number, records
from recmill.report.units import format_compact, format_count, format_share

DAY_S = 86_400


def checks_of(run: Run) -> Mapping[str, Any]:
    """What `recmill prepare` wrote about the data; empty for logs that it did not make."""
    return mapping(mapping(run.part("schema").get("info")).get("checks"))


def checks_section(runs: Sequence[Run]) -> Section:
    checked = [run for run in runs if checks_of(run)]
    return Section(
        id="checks",
        title="Data checks",
        intro="Found before the log was written. A warning deserves a look: recmill prepare --strict refuses it.",
        blocks=part_blocks(checked, "schema", check_blocks),
    )


def check_blocks(run: Run) -> list[PageBlock]:
    checks = checks_of(run)
    found = records(checks.get("findings"))
    warnings = [finding for finding in found if finding.get("level") == "warning"]
    names = [str(name) for name in checks.get("checks", [])]
    cards = Cards(
        cards=[
            Card(label="Warnings", value=str(len(warnings)), tone="bad" if warnings else "good"),
            Card(label="Checks", value=str(len(names)), note=", ".join(names)),
        ]
    )
    remarks = [finding for finding in found if finding not in warnings]
    blocks: list[PageBlock] = [cards]
    if warnings:
        blocks.append(findings_table(warnings, "Warnings"))
    if remarks:
        table = findings_table(remarks, "")
        blocks.append(Details(summary=f"Remarks ({len(remarks)})", blocks=[table]))
    return [*blocks, *day_charts(records(checks.get("days")))]


def findings_table(found: Sequence[Mapping[str, Any]], title: str) -> PageTable:
    rows = [
        [
            Cell(text=str(finding.get("check", ""))),
            Cell(text=str(finding.get("subject", ""))),
            Cell(text=str(finding.get("message", ""))),
            Cell(text="; ".join(_row_text(row) for row in records(finding.get("examples")))),
        ]
        for finding in found
    ]
    return PageTable(title=title, columns=("Check", "About", "Found", "Examples"), rows=rows, is_prose=True)


def _row_text(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items())


def day_charts(days: Sequence[Mapping[str, Any]]) -> list[PageBlock]:
    if len(days) < 2:
        return []
    at = [_day_number(str(day.get("day"))) for day in days]
    x = Axis(name="day (UTC)", format=_day_text)
    counts = [(when, value) for when, day in zip(at, days, strict=True) if (value := number(day.get("num_events")))]
    charts: list[PageBlock] = [
        line_block(
            [Series(legend=Legend.of("events", 0), points=counts, has_dots=len(days) <= 31)],
            title="Events per day",
            description="Number of events on each day of the log.",
            x=x,
            y=Axis(name="events", format=format_compact, low=0.0),
        )
    ]
    labels = [name for name in days[0] if name not in ("day", "num_events")]
    rates = [
        Series(
            legend=Legend.of(name, position),
            points=[
                (when, rate) for when, day in zip(at, days, strict=True) if (rate := number(day.get(name))) is not None
            ],
            has_dots=len(days) <= 31,
        )
        for position, name in enumerate(labels)
    ]
    if rates:
        charts.append(
            line_block(
                rates,
                title="Label rate per day",
                description="Share of each day's events with label 1.",
                x=x,
                y=Axis(name="share of events", format=format_share, low=0.0),
                note=f"{format_count(len(days))} days with events.",
            )
        )
    return charts


def _day_number(day: str) -> float:
    return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() / DAY_S


def _day_text(value: float) -> str:
    return f"{datetime.fromtimestamp(round(value) * DAY_S, UTC):%d %b}"
