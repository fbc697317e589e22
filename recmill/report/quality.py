"""How good the predictions are: every metric with its standard error, reliability, new and rare ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recmill.report.drawing.blocks import Cell, Note, PageBlock, PageTable, Section, first_open, line_block
from recmill.report.drawing.charts import Axis, Reference, Series
from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run, mapping, number, records
from recmill.report.units import DASH, format_count, format_metric, format_share
from recmill.training.metrics.catalogue import metric_names

Metrics = Mapping[str, Any]


def quality_section(runs: Sequence[Run]) -> Section:
    measured = [run for run in runs if metrics_of(run).get("standard_errors")]
    blocks: list[PageBlock] = [
        Note(text=f"{run.label} has no detailed metrics.") for run in runs if run not in measured
    ]
    if measured:
        legends = {run.label: Legend.of(run.label, position) for position, run in enumerate(runs)}
        blocks += [metrics_table(measured), reliability_chart(measured, legends)]
        blocks += first_open(measured, "New, rare and frequent ids", slice_blocks)
    return Section(
        id="quality",
        title="Quality of the predictions",
        intro="Measured on held-out sessions. The standard error comes from resampling sessions: differences of less "
        "than two of them may be chance.",
        blocks=blocks,
    )


def metrics_of(run: Run) -> Metrics:
    return mapping(run.part("training").get("metrics"))


def with_error(value: float | None, error: float | None) -> str:
    """0.7639 ± 0.0021"""
    if value is None:
        return DASH
    return format_metric(value) + (f" ± {format_metric(error)}" if error is not None else "")


def metrics_table(runs: Sequence[Run]) -> PageTable:
    """One row per metric: a column with value and error per run, and what the metric means."""
    rows = []
    for entry in metric_names({key: 0 for run in runs for key in metrics_of(run)}):
        cells = []
        for run in runs:
            value = run.number("training", "metrics", entry.key)
            error = run.number("training", "metrics", "standard_errors", entry.key)
            shown = [Cell(text=format_metric(value) if value is not None else DASH, sort=value)]
            shown.append(Cell(text=format_metric(error) if error is not None else DASH, sort=error))
            cells += shown if len(runs) == 1 else [Cell(text=with_error(value, error), sort=value)]
        rows.append([Cell(text=entry.title), *cells, Cell(text=entry.meaning)])
    values = ["Value", "Standard error"] if len(runs) == 1 else [run.label for run in runs]
    return PageTable(
        title="Metrics",
        columns=["Metric", *values, "Meaning"],
        rows=rows,
        numeric=frozenset(range(1, len(values) + 1)),
        is_sortable=False,
        note=groups_note(metrics_of(runs[0])),
    )


def groups_note(metrics: Metrics) -> str:
    """What a group is, and how many could not be ranked."""
    groups = {key: number(value) for key, value in mapping(metrics.get("groups")).items() if key != "kind"}
    kind, count, one_class = (
        mapping(metrics.get("groups")).get("kind"),
        groups.get("num_groups"),
        groups.get("num_one_class"),
    )
    if not kind or count is None or one_class is None:
        return ""
    text = (
        f"GAUC: {format_count(count)} {kind}s, of which {format_count(one_class)} have one class only and do not count"
    )
    without, sessions = groups.get("num_without_positive"), groups.get("num_sessions")
    if without is not None and sessions is not None:
        text += f". MRR, NDCG, recall and hit rate: {format_count(sessions - without)} sessions with a positive"
        text += f" of {format_count(sessions)}"
    return text + ". Equal scores count as the mean over their orders."


def reliability_chart(runs: Sequence[Run], legends: Mapping[str, Legend]) -> PageBlock:
    lines = []
    for run in runs:
        bins = records(metrics_of(run).get("reliability"))
        found = [(number(entry.get("predicted")), number(entry.get("observed"))) for entry in bins]
        points = [(x, y) for x, y in found if x is not None and y is not None]
        if points:
            lines.append(Series(legend=legends[run.label], points=points, has_dots=True))
    if not lines:
        return Note(text="No reliability was recorded.")
    top = max(value for line in lines for point in line.points for value in point)
    return line_block(
        lines,
        title="Reliability",
        description="Observed rate by mean prediction, in bins of equal mass; the diagonal is perfect calibration.",
        x=Axis(name="predicted", format=format_share, low=0.0, high=top),
        y=Axis(name="observed", format=format_share, low=0.0, high=top),
        references=[Reference(name="perfect calibration", points=((0.0, 0.0), (top, top)))],
        note="Above the diagonal the model predicts too little, below it too much.",
    )


def slice_blocks(run: Run) -> list[PageBlock]:
    slices = records(metrics_of(run).get("slices"))
    if not slices:
        return [Note(text="schema.json names no user or item: nothing to say about new, rare and frequent ids.")]
    rows = []
    for entry in slices:
        errors, count = mapping(entry.get("standard_errors")), number(entry.get("num_samples"))
        cells = [Cell(text=f"{entry.get('kind')} {entry.get('feature')}"), Cell(text=seen(entry))]
        cells.append(Cell(text=format_count(count) if count is not None else DASH, sort=count))
        for key in ("auc", "log_loss"):
            value = number(entry.get(key))
            cells.append(Cell(text=with_error(value, number(errors.get(key))), sort=value))
        rows.append(cells)
    return [
        PageTable(
            title="New, rare and frequent ids",
            columns=["Held-out samples with", "Seen in training", "Samples", "AUC", "Log loss"],
            rows=rows,
            numeric=frozenset({2, 3, 4}),
            is_sortable=False,
            is_wide=False,
            note="New: never in the training split. The others are cut at the median.",
        )
    ]


def seen(entry: Metrics) -> str:
    """How often training saw the ids of a slice."""
    low, high = number(entry.get("low")) or 0, number(entry.get("high"))
    if high == 1:
        return "never"
    if high is None:
        return f"{format_count(low)} times or more"
    return f"{format_count(low)} to {format_count(high - 1)} times" if high - 1 > low else f"{format_count(low)} times"
