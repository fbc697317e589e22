"""Runs compared with a baseline, figure by figure.

A ratio above 1 always means better: ours / baseline where more is better, baseline / ours where less is better.
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
    text_table,
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the comparison: how to find and format the value of a run."""

    key: str
    title: str
    unit: str = ""
    read: Callable[[Run], float | None]
    format: Callable[[float], str]
    more_is_better: bool = False
    by_difference: bool = False
    noise: float = 0.02  # smaller changes (relative, or of the difference) count as neither better nor worse

    @property
    def name(self) -> str:
        """The title, with the unit where the format does not show it."""
        return self.title + (f", {self.unit}" if self.unit == "samples/s" else "")


def bytes_per_sample(run: Run) -> float | None:
    size, rows = run.data_bytes, run.number("dataset", "num_rows")
    return size / rows if size is not None and rows else None


def total_seconds(run: Run) -> float | None:
    """The recorded time of the run; if it has not finished, the sum of its steps."""
    seconds = [number(step.get("seconds")) for step in run.steps.values()]
    return run.number("run", "seconds") or sum(s for s in seconds if s is not None) or None


def training_figure(
    key: str, title: str, format: Callable[[float], str], *, keys: Sequence[str] = (), **how: Any
) -> Figure:
    """A number of the training result, found at `keys` (default: at `key`)."""
    return Figure(
        key=key, title=title, read=lambda run: run.number("training", *(keys or (key,))), format=format, **how
    )


def quality_figure(key: str, title: str, *, more_is_better: bool = False) -> Figure:
    # Quality metrics vary in a narrow band around their best value: compare them by difference, not by ratio.
    how = {"more_is_better": more_is_better, "by_difference": True, "noise": 0.001}
    return training_figure(key, title, format_metric, keys=("metrics", key), **how)


FIGURES = (
    training_figure("samples_per_s", "Training throughput", format_compact, unit="samples/s", more_is_better=True),
    quality_figure("auc", "AUC", more_is_better=True),
    quality_figure("log_loss", "Log loss"),
    quality_figure("normalised_entropy", "Normalised entropy"),
    Figure(
        key="stall_share",
        title="Waiting for data",
        unit="share of the time",
        read=lambda run: run.stall_share,
        format=format_share,
    ),
    Figure(key="data_bytes", title="Data on disk", unit="bytes", read=lambda run: run.data_bytes, format=format_bytes),
    Figure(key="bytes_per_sample", title="Bytes per sample", unit="bytes", read=bytes_per_sample, format=format_bytes),
    training_figure("peak_memory_bytes", "Peak memory, training", format_bytes, unit="bytes"),
    training_figure(
        "embedding_bytes", "Embedding tables", format_bytes, keys=("model", "embedding_bytes"), unit="bytes"
    ),
    Figure(key="total_seconds", title="Whole run", unit="s", read=total_seconds, format=format_seconds),
)


def step_figure(step: str) -> Figure:
    def seconds(run: Run) -> float | None:
        return number(run.steps.get(step, {}).get("seconds"))

    title = f"Step: {readable_name(step).lower()}"
    return Figure(key=f"{step}_seconds", title=title, unit="s", read=seconds, format=format_seconds)


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of one run and of the baseline."""

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
        """The change from the baseline: +0.0012 for a quality metric, 2.31× for the others."""
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


def compare_runs(runs: Sequence[Run]) -> list[list[ComparedFigure]]:
    """For each figure that any run has, its value in every run and in the first."""
    steps = list(dict.fromkeys(step for run in runs for step in run.steps))
    table = []
    for figure in (*FIGURES, *(step_figure(step) for step in steps)):
        values = [figure.read(run) for run in runs]
        if any(value is not None for value in values):
            table.append([ComparedFigure(figure=figure, value=value, baseline=values[0]) for value in values])
    return table


def comparison_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as JSON: figures, ratios and differences of every run."""
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
    """The comparison as a table for a terminal: values, with the ratio or difference to the first run in brackets."""
    rows = [["", *(run.label for run in runs)]]
    for row in compare_runs(runs):
        cells = [
            f"{cell.text} ({cell.change})" if position and cell.change else cell.text
            for position, cell in enumerate(row)
        ]
        rows.append([row[0].figure.name, *cells])
    return text_table(rows)
