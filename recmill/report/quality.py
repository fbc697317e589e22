"""How good the predictions are: every metric with its standard error, reliability, new and rare ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recmill.report.drawing.blocks import Cell, Details, Note, PageTable, Section, heading, value_cell
from recmill.report.drawing.charts import Axis, PageBlock, Reference, Series, line_block
from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run, mapping, number, pairs, records
from recmill.report.units import DASH, format_count, format_metric, format_share
from recmill.training.metrics.catalogue import metric_names, metrics_by_label

Metrics = Mapping[str, Any]
Measured = Mapping[str, Metrics]  # label of the run -> its metrics


def quality_section(runs: Sequence[Run]) -> Section:
    found = {run.label: mapping(run.part("training").get("metrics")) for run in runs}
    measured = {label: metrics for label, metrics in found.items() if metrics.get("standard_errors")}
    blocks: list[PageBlock] = [
        Note(text=f"{label} has no detailed metrics.") for label in found if label not in measured
    ]
    legends = {run.label: Legend.of(run.label, position) for position, run in enumerate(runs)}
    by_label = {label: metrics_by_label(metrics) for label, metrics in measured.items()}
    for task in dict.fromkeys(task for tasks in by_label.values() for task in tasks):
        own = {label: tasks[task] for label, tasks in by_label.items() if task in tasks}
        blocks += [*heading(f"Label: {task}" if task else ""), metrics_table(own), reliability_chart(own, legends)]
        blocks += slice_blocks(own)
    return Section(
        id="quality",
        title="Quality of the predictions",
        intro="Measured on held-out sessions. The standard error comes from resampling sessions: differences of less "
        "than two of them may be chance.",
        blocks=blocks,
    )


def with_error(value: float | None, error: float | None) -> str:
    """0.7639 ± 0.0021"""
    if value is None:
        return DASH
    return format_metric(value) + (f" ± {format_metric(error)}" if error is not None else "")


def metrics_table(measured: Measured) -> PageTable:
    """One row per metric: a column with value and error per run, and what the metric means."""
    rows = []
    for entry in metric_names({key: 0 for metrics in measured.values() for key in metrics}):
        cells = []
        for metrics in measured.values():
            value, error = number(metrics.get(entry.key)), number(mapping(metrics["standard_errors"]).get(entry.key))
            both = [value_cell(value, format_metric), value_cell(error, format_metric)]
            cells += both if len(measured) == 1 else [Cell(text=with_error(value, error), sort=value)]
        rows.append([Cell(text=entry.title), *cells, Cell(text=entry.meaning)])
    values = ["Value", "Standard error"] if len(measured) == 1 else list(measured)
    return PageTable(
        title="Metrics",
        columns=["Metric", *values, "Meaning"],
        rows=rows,
        numeric=frozenset(range(1, len(values) + 1)),
        is_sortable=False,
        is_explained=True,
        note=groups_note(next(iter(measured.values()))),
    )


def groups_note(metrics: Metrics) -> str:
    """What a group is, and how many could not be ranked."""
    groups = mapping(metrics.get("groups"))
    kind = groups.get("kind")
    count, one_class = (number(groups.get(key)) for key in ("num_groups", "num_one_class"))
    if not kind or count is None or one_class is None:
        return ""
    text = (
        f"GAUC: {format_count(count)} {kind}s, of which {format_count(one_class)} have one class only and do not count"
    )
    without, sessions = (number(groups.get(key)) for key in ("num_without_positive", "num_sessions"))
    if without is not None and sessions is not None:
        text += f". MRR, NDCG, recall and hit rate: {format_count(sessions - without)} sessions with a positive"
        text += f" of {format_count(sessions)}"
    return text + ". Equal scores count as the mean over their orders."


def reliability_chart(measured: Measured, legends: Mapping[str, Legend]) -> PageBlock:
    lines = []
    for label, metrics in measured.items():
        if points := pairs(records(metrics.get("reliability")), "predicted", "observed"):
            lines.append(Series(legend=legends[label], points=points, has_dots=True))
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


def slice_blocks(measured: Measured) -> list[PageBlock]:
    """The slices of the first run, and those of the others collapsed."""
    blocks: list[PageBlock] = []
    for position, (label, metrics) in enumerate(measured.items()):
        own = slice_table(metrics)
        blocks.append(Details(summary=f"New, rare and frequent ids of {label}", blocks=[own]) if position else own)
    return blocks


def slice_table(metrics: Metrics) -> PageBlock:
    slices = records(metrics.get("slices"))
    if not slices:
        return Note(text="schema.json names no user or item: nothing to say about new, rare and frequent ids.")
    rows = []
    for entry in slices:
        errors, count = mapping(entry.get("standard_errors")), number(entry.get("num_samples"))
        cells = [Cell(text=f"{entry.get('kind')} {entry.get('feature')}"), Cell(text=seen(entry))]
        cells.append(value_cell(count, format_count))
        for key in ("auc", "log_loss"):
            value = number(entry.get(key))
            cells.append(Cell(text=with_error(value, number(errors.get(key))), sort=value))
        rows.append(cells)
    return PageTable(
        title="New, rare and frequent ids",
        columns=["Id", "Seen", "Samples", "AUC", "Log loss"],
        rows=rows,
        numeric=frozenset({2, 3, 4}),
        is_sortable=False,
        is_wide=False,
        note="Seen: samples of the training split with the same id. Those seen are cut at the median.",
    )


def seen(entry: Metrics) -> str:
    """How often training saw the ids of a slice."""
    low, high = number(entry.get("low")) or 0, number(entry.get("high"))
    if high == 1:
        return "never"
    if high is None:
        return f"{format_count(low)}+"
    return f"{format_count(low)}–{format_count(high - 1)}" if high - 1 > low else format_count(low)
