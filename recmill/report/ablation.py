"""The gain of each switch: the variants of an ablation compared with the baseline, as a waterfall and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts import InputError, check_format_version, read_checked_json
from recmill.report.drawing.blocks import Cell, Note, PageTable, Section, value_cell
from recmill.report.drawing.charts import Axis, PageBlock, Span, span_block
from recmill.report.runs import number, records
from recmill.report.units import (
    DASH,
    format_bytes,
    format_compact,
    format_metric,
    format_number,
    format_ratio,
    format_seconds,
    format_share,
    text_table,
)
from recmill.training.switches import ABLATION_FILE, Switch

RESAMPLES = 10_000  # of a bootstrap
TOLERANCE = 0.002  # how far below the baseline's AUC still counts as reaching it


@dataclass(frozen=True, kw_only=True)
class MeasuredVariant:
    """One variant as the comparison recorded it."""

    name: str
    switches: frozenset[str]
    repeats: Sequence[Mapping[str, Any]]

    def values(self, figure: str) -> list[float]:
        found = [number(repeat.get(figure)) for repeat in self.repeats]
        return [value for value in found if value is not None]

    def median(self, figure: str) -> float | None:
        values = self.values(figure)
        return statistics.median(values) if values else None

    def seconds_to_auc_of(self, baseline: MeasuredVariant) -> float | None:
        """Median training seconds to the baseline's AUC in the same repeat, less the tolerance; None if most repeats
        never reached it.
        """
        reached = []
        for own, other in zip(self.repeats, baseline.repeats, strict=False):
            auc = number(other.get("auc"))
            seconds = None if auc is None else time_to_auc(own, auc - TOLERANCE)
            reached.append(math.inf if seconds is None else seconds)
        middle = statistics.median(reached) if reached else math.inf
        return middle if math.isfinite(middle) else None


def time_to_auc(figures: Mapping[str, Any], target: float) -> float | None:
    """Training seconds of one run until an evaluation reached the AUC."""
    points = figures.get("evaluations") or []
    return next((seconds for seconds, auc in points if auc is not None and auc >= target), None)


def load_ablation(path: str | Path) -> list[MeasuredVariant]:
    """The variants of a comparison's folder; the first is the baseline."""
    file = Path(path) / ABLATION_FILE
    loaded = read_checked_json(file)
    check_format_version(loaded, file)
    variants = [
        MeasuredVariant(
            name=str(entry.get("name")),
            switches=frozenset(map(str, entry.get("switches") or ())),
            repeats=records(entry.get("repeats")),
        )
        for entry in records(loaded.get("variants"))
    ]
    if not variants or variants[0].switches:
        raise InputError(f"{file}: has no finished comparison with a baseline; run `recmill compare --preset` again")
    return variants


def speed_ratio(variant: MeasuredVariant, baseline: MeasuredVariant) -> float | None:
    """Samples per second relative to the baseline: the geometric mean over paired repeats."""
    logs = turn_logs(variant, baseline)
    return math.exp(statistics.fmean(logs)) if logs else None


def speed_interval(variant: MeasuredVariant, baseline: MeasuredVariant) -> tuple[float, float] | None:
    """The 95% interval of the ratio; None for the baseline itself and for a single repeat."""
    logs = turn_logs(variant, baseline)
    if len(logs) < 2 or variant is baseline:
        return None
    low, high = bootstrap_interval(logs)
    return math.exp(low), math.exp(high)


def turn_logs(variant: MeasuredVariant, baseline: MeasuredVariant) -> list[float]:
    """Logarithms of the ratios of repeats that were trained one after the other."""
    pairs = zip(variant.values("samples_per_s"), baseline.values("samples_per_s"), strict=False)
    return [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]


def auc_difference(variant: MeasuredVariant, baseline: MeasuredVariant) -> tuple[float, float] | None:
    """The mean of the AUC less the baseline's with the same seed, and its standard error; None for one repeat."""
    differences = [a - b for a, b in zip(variant.values("auc"), baseline.values("auc"), strict=False)]
    if len(differences) < 2 or variant is baseline:
        return None
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def bootstrap_interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The interval of the mean of at least two values, from means of samples drawn with replacement.

    The percentiles are widened by the root of n / (n - 1): resampling understates the variance of few values.
    """
    middle, count = statistics.fmean(values), len(values)
    drawn = np.random.default_rng(seed).choice(np.asarray(values), size=(RESAMPLES, count)).mean(axis=1)
    ends = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    low, high = middle + (ends - middle) * math.sqrt(count / (count - 1))
    return float(low), float(high)


def ablation_section(variants: Sequence[MeasuredVariant]) -> Section:
    """The section that opens the page of a comparison."""
    named = "; ".join(f"{switch}: {switch.label}" for switch in Switch if switch in variants[-1].switches)
    repeats = len(variants[0].repeats)
    how = "once" if repeats == 1 else f"{repeats} times, alternating, in both orders and with {repeats} seeds"
    return Section(
        id="switches",
        title="What each switch gains",
        intro=f"The same data trained with no switch, each switch alone, all but one, and all. Each variant ran {how}.",
        blocks=[
            *waterfall(variants),
            *leave_one_out(variants),
            variants_table(variants),
            *predictions(variants),
            Note(text=f"Switches: {named}."),
        ],
    )


def waterfall(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """From the baseline to all switches: the gain of each switch alone, then their interaction."""
    baseline, everything = variants[0], variants[-1]
    alone = [variant for variant in variants if len(variant.switches) == 1]
    whole = speed_ratio(everything, baseline)
    if not alone or whole is None or len(everything.switches) < 2:
        return []
    spans, level = [Span(name="baseline", start=0.0, end=1.0, text="1×")], 1.0
    ratios = {variant.name: speed_ratio(variant, baseline) or 1.0 for variant in alone}
    for name in sorted(ratios, key=lambda name: -ratios[name]):
        spans.append(_change(name, level, ratios[name]))
        level *= ratios[name]
    spans.append(_change("interaction", level, whole / level))
    spans.append(Span(name="all", start=0.0, end=whole, text=format_ratio(whole)))
    chart = span_block(
        spans,
        title="From the baseline to all switches",
        description="Training throughput relative to the baseline: each switch alone, their interaction, all switches.",
        axis=Axis(name="throughput relative to the baseline", format=format_number),
        note="Each bar is the ratio of one switch alone. “Interaction” is the remaining ratio when all are on: below "
        "1, the switches save some of the same time.",
    )
    return [chart]


def _change(name: str, start: float, ratio: float) -> Span:
    """A step of a waterfall: up and good, or down and bad."""
    tone = "good" if ratio >= 1 else "bad"
    return Span(name=name, start=start, end=start * ratio, text=format_ratio(ratio), tone=tone)


def leave_one_out(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """The loss when one switch is turned off and all others are on."""
    everything = variants[-1]
    spans = []
    for switch in Switch:
        kept = everything.switches - {switch}
        without = next((v for v in variants if v.switches == kept and 1 < len(kept) < len(everything.switches)), None)
        if without is not None and (ratio := speed_ratio(everything, without)) is not None:
            spans.append(_change(f"without {switch}", 1.0, ratio))
    if not spans:
        return []
    chart = span_block(
        spans,
        title="Gain of each switch when all others are on",
        description="Throughput with all switches relative to all but one, one bar per switch.",
        axis=Axis(name="all switches relative to all but one", format=format_number),
        note="Above 1, the switch helps even when all others are on.",
    )
    return [chart]


# Figure -> (title of its column, format).
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_s": ("Samples/s", format_compact),
    "auc": ("AUC", format_metric),
    "peak_memory_bytes": ("Peak memory", format_bytes),
    "data_bytes": ("On disk", format_bytes),
    "wire_bytes_per_sample": ("Network per sample", format_bytes),
    "cpu_seconds_per_million": ("CPU s per million", format_number),
    "stall_share": ("Waiting for data", format_share),
}


def variants_table(variants: Sequence[MeasuredVariant]) -> PageTable:
    baseline = variants[0]
    rows = []
    for variant in variants:
        interval, difference = speed_interval(variant, baseline), auc_difference(variant, baseline)
        spread = f" ({' to '.join(map(format_ratio, interval))})" if interval else ""
        ratio = speed_ratio(variant, baseline)
        seconds = variant.seconds_to_auc_of(baseline)
        rows.append(
            [
                Cell(text=variant.name),
                Cell(text=value_cell(ratio, format_ratio).text + spread, sort=ratio),
                Cell(text=f"{difference[0]:+.4f} ± {difference[1]:.4f}", sort=difference[0])
                if difference
                else Cell(text=DASH),
                *(value_cell(variant.median(figure), style) for figure, (_, style) in COLUMNS.items()),
                value_cell(seconds, format_seconds),
            ]
        )
    return PageTable(
        columns=["Variant", "Relative to baseline", "AUC difference", *(t for t, _ in COLUMNS.values()), "Time to AUC"],
        rows=rows,
        numeric=frozenset(range(1, len(COLUMNS) + 4)),
        note="Medians of the repeats. “Relative to baseline” is the speed, with its 95% interval over pairs of "
        "repeats. “AUC difference” is the mean over seeds with its standard error. “Time to AUC” is the training time "
        f"until the held-out AUC was within {TOLERANCE:g} of the baseline's final AUC of the same seed; a dash means "
        "not in most repeats. Network bytes were counted at the network interface during training.",
    )


def predictions(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """The bytes per step that the plans predicted, and the bytes that the network carried."""
    rows = []
    for variant in variants:
        predicted, measured = (variant.median(f"{which}_bytes_per_step") for which in ("predicted", "measured"))
        if predicted is not None and measured:
            error = predicted / measured - 1
            sent = [value_cell(value, format_bytes) for value in (predicted, measured)]
            rows.append([Cell(text=variant.name), *sent, Cell(text=f"{error:+.0%}", sort=abs(error))])
    if not rows:
        return []
    return [
        PageTable(
            columns=["Variant", "Predicted per step", "Measured per step", "Error"],
            rows=rows,
            numeric=frozenset(range(1, 4)),
            note="Bytes of all ranks: rows, ids and their gradients as the plan predicts them from the profile, plus "
            "dense gradients. Variants with hot batches or shared parameters send other messages and are omitted.",
        )
    ]


def ablation_lines(variants: Sequence[MeasuredVariant]) -> list[str]:
    """The table for a terminal."""
    table = variants_table(variants)
    rows = [list(table.columns), *([cell.text for cell in row] for row in table.rows)]
    return text_table(rows)


def ablation_json(variants: Sequence[MeasuredVariant]) -> list[dict[str, Any]]:
    """The variants as JSON: medians, ratio to the baseline and AUC difference with their errors, seconds to the AUC."""
    baseline = variants[0]
    found = []
    for variant in variants:
        interval, difference = speed_interval(variant, baseline), auc_difference(variant, baseline)
        found.append(
            {
                "name": variant.name,
                "switches": sorted(variant.switches),
                "ratio": speed_ratio(variant, baseline),
                "interval": interval,
                "auc_difference": difference[0] if difference else None,
                "auc_difference_error": difference[1] if difference else None,
                "median": {figure: variant.median(figure) for figure in COLUMNS},
                "seconds_to_auc": variant.seconds_to_auc_of(baseline),
            }
        )
    return found
