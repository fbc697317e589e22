"""Runs against a baseline, figure by figure.

A ratio above 1 always means better: ours / baseline where more is better, baseline / ours where less is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recmill.artifacts import FORMAT_VERSION
from recmill.report.runs import Run, number
from recmill.report.units import (
    DASH,
    format_bytes,
    format_compact,
    format_metric,
    format_ratio,
    format_seconds,
    format_share,
    readable_name,
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the comparison: how a run's value is found and read."""

    key: str
    title: str
    unit: str
    read: Callable[[Run], float | None]
    format: Callable[[float], str]
    more_is_better: bool = False
    # Quality metrics live in a narrow band around their best value: people compare them by difference, not by ratio.
    by_difference: bool = False
    noise: float = 0.02  # smaller changes (relative, or of the difference) are not called better or worse


def bytes_per_sample(run: Run) -> float | None:
    size, rows = run.data_bytes, run.number("dataset", "num_rows")
    return size / rows if size is not None and rows else None


def total_seconds(run: Run) -> float | None:
    """The run's own time; while it is not over, the sum of its steps."""
    seconds = [number(step.get("seconds")) for step in run.steps.values()]
    return run.number("run", "seconds") or sum(s for s in seconds if s is not None) or None


def metric(*keys: str) -> Callable[[Run], float | None]:
    return lambda run: run.number("training", *keys)


FIGURES = (
    Figure(
        key="samples_per_s",
        title="Training throughput",
        unit="samples/s",
        read=metric("samples_per_s"),
        format=format_compact,
        more_is_better=True,
    ),
    Figure(
        key="auc",
        title="AUC",
        unit="",
        read=metric("metrics", "auc"),
        format=format_metric,
        more_is_better=True,
        by_difference=True,
        noise=0.001,
    ),
    Figure(
        key="log_loss",
        title="Log loss",
        unit="",
        read=metric("metrics", "log_loss"),
        format=format_metric,
        by_difference=True,
        noise=0.001,
    ),
    Figure(
        key="normalised_entropy",
        title="Normalised entropy",
        unit="",
        read=metric("metrics", "normalised_entropy"),
        format=format_metric,
        by_difference=True,
        noise=0.001,
    ),
    Figure(
        key="stall_share",
        title="Waiting for data",
        unit="share of the time",
        read=lambda run: run.stall_share,
        format=format_share,
    ),
    Figure(key="data_bytes", title="Data on disk", unit="bytes", read=lambda run: run.data_bytes, format=format_bytes),
    Figure(key="bytes_per_sample", title="Bytes a sample", unit="bytes", read=bytes_per_sample, format=format_bytes),
    Figure(
        key="peak_memory_bytes",
        title="Peak memory, training",
        unit="bytes",
        read=metric("peak_memory_bytes"),
        format=format_bytes,
    ),
    Figure(
        key="embedding_bytes",
        title="Embedding tables",
        unit="bytes",
        read=metric("model", "embedding_bytes"),
        format=format_bytes,
    ),
    Figure(key="total_seconds", title="Whole run", unit="s", read=total_seconds, format=format_seconds),
)


def step_figure(step: str) -> Figure:
    def seconds(run: Run) -> float | None:
        return number(run.steps.get(step, {}).get("seconds"))

    return Figure(
        key=f"{step}_seconds",
        title=f"Step: {readable_name(step).lower()}",
        unit="s",
        read=seconds,
        format=format_seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure of one run, beside the baseline's."""

    figure: Figure
    value: float | None
    baseline: float | None

    @property
    def ratio(self) -> float | None:
        if self.value is None or self.baseline is None:
            return None
        above, below = (self.value, self.baseline) if self.figure.more_is_better else (self.baseline, self.value)
        return above / below if below else None

    @property
    def difference(self) -> float | None:
        return None if self.value is None or self.baseline is None else self.value - self.baseline

    @property
    def text(self) -> str:
        return DASH if self.value is None else self.figure.format(self.value)

    @property
    def change(self) -> str:
        """How it stands to the baseline: +0.0012 for a quality metric, 2.31× for the rest."""
        if self.figure.by_difference:
            if self.difference is None:
                return ""
            return f"{self.difference:+.4f}".replace("-", "−") if abs(self.difference) >= 0.00005 else "same"
        return "" if self.ratio is None else format_ratio(self.ratio)

    @property
    def tone(self) -> str:
        """ "good" or "bad" where the change is larger than its noise, else ""."""
        if self.ratio is None or self.difference is None:
            return ""
        if self.figure.by_difference:
            gain = self.difference if self.figure.more_is_better else -self.difference
        else:
            gain = self.ratio - 1 if self.ratio >= 1 else 1 - 1 / self.ratio if self.ratio else -1.0
        return "good" if gain > self.figure.noise else "bad" if gain < -self.figure.noise else ""


def compare_runs(runs: Sequence[Run]) -> list[list[Measured]]:
    """For each figure that any run has, its value in every run beside the first's."""
    steps = list(dict.fromkeys(step for run in runs for step in run.steps))
    table = []
    for figure in (*FIGURES, *(step_figure(step) for step in steps)):
        values = [figure.read(run) for run in runs]
        if any(value is not None for value in values):
            table.append([Measured(figure=figure, value=value, baseline=values[0]) for value in values])
    return table


def comparison_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison for machines: figures, ratios and differences of every run."""
    table = compare_runs(runs)
    return {
        "format_version": FORMAT_VERSION,
        "kind": "comparison",
        "baseline": runs[0].label,
        "units": {row[0].figure.key: row[0].figure.unit for row in table},
        "runs": [
            {
                "name": run.label,
                "path": run.path,
                "figures": {row[position].figure.key: row[position].value for row in table},
                "ratios": {row[position].figure.key: row[position].ratio for row in table},
                "differences": {row[position].figure.key: row[position].difference for row in table},
                "missing": run.missing,
            }
            for position, run in enumerate(runs)
        ],
    }


def comparison_lines(runs: Sequence[Run]) -> list[str]:
    """The comparison as a table for a terminal: value, and in brackets the ratio or difference to the first run."""
    rows = [["", *(run.label for run in runs)]]
    for row in compare_runs(runs):
        unit = f", {row[0].figure.unit}" if row[0].figure.unit == "samples/s" else ""
        cells = [
            f"{cell.text} ({cell.change})" if position and cell.change else cell.text
            for position, cell in enumerate(row)
        ]
        rows.append([row[0].figure.title + unit, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
