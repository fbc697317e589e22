"""The gain of each switch: the variants of an ablation compared with the baseline, as a waterfall and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, check_format_version, read_json
from recmill.report.drawing.blocks import Cell, Chart, Note, PageBlock, PageTable, Section, value_cell
from recmill.report.drawing.charts import Axis, Span, span_chart
from recmill.report.runs import number, records
from recmill.report.units import (
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

    def seconds_to(self, auc: float) -> float | None:
        """Median training seconds until an evaluation reached the AUC; None if a repeat never did."""
        reached = [seconds for repeat in self.repeats if (seconds := time_to_auc(repeat, auc)) is not None]
        return statistics.median(reached) if len(reached) == len(self.repeats) and reached else None


def time_to_auc(figures: Mapping[str, Any], target: float) -> float | None:
    """Training seconds of one run until an evaluation reached the AUC."""
    points = figures.get("evaluations") or []
    return next((seconds for seconds, auc in points if auc is not None and auc >= target), None)


def load_ablation(path: str | Path) -> list[MeasuredVariant]:
    """The variants of a comparison's folder; the first is the baseline."""
    file = Path(path) / ABLATION_FILE
    loaded = read_json(file)
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


def target_auc(variants: Sequence[MeasuredVariant]) -> float | None:
    """The AUC that every variant is timed to reach: the baseline's AUC less the tolerance."""
    auc = variants[0].median("auc")
    return None if auc is None else auc - TOLERANCE


def speed_ratio(variant: MeasuredVariant, baseline: MeasuredVariant) -> float | None:
    """Samples per second relative to the baseline: the median of the ratios of paired repeats."""
    ratios = turn_ratios(variant, baseline)
    return statistics.median(ratios) if ratios else None


def turn_ratios(variant: MeasuredVariant, baseline: MeasuredVariant) -> list[float]:
    pairs = zip(variant.values("samples_per_s"), baseline.values("samples_per_s"), strict=False)
    return [ours / theirs for ours, theirs in pairs if theirs]


def ablation_section(variants: Sequence[MeasuredVariant]) -> Section:
    """The section that opens the page of a comparison."""
    baseline = variants[0]
    blocks: list[PageBlock] = [*waterfall(variants), *leave_one_out(variants), variants_table(variants)]
    blocks += predictions(variants)
    blocks.append(Note(text=switch_names(variants)))
    repeats = len(baseline.repeats)
    how = "once" if repeats == 1 else f"{repeats} times, alternating and in both orders"
    return Section(
        id="switches",
        title="What each switch gains",
        intro=f"The same data trained with no switch, each switch alone, all but one, and all. Each variant ran {how}.",
        blocks=blocks,
    )


def waterfall(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """From the baseline to all switches: the gain of each switch alone, then their interaction."""
    baseline, everything = variants[0], variants[-1]
    alone = [variant for variant in variants if len(variant.switches) == 1]
    whole = speed_ratio(everything, baseline)
    if not alone or whole is None or len(everything.switches) < 2:
        return []
    spans = [Span(name="baseline", start=0.0, end=1.0, text="1×", tone="")]
    level = 1.0
    for variant in sorted(alone, key=lambda variant: -(speed_ratio(variant, baseline) or 1.0)):
        ratio = speed_ratio(variant, baseline) or 1.0
        tone = "good" if ratio >= 1 else "bad"
        spans.append(Span(name=variant.name, start=level, end=level * ratio, text=format_ratio(ratio), tone=tone))
        level *= ratio
    overlap = whole / level
    tone = "good" if overlap >= 1 else "bad"
    spans.append(Span(name="interaction", start=level, end=whole, text=format_ratio(overlap), tone=tone))
    spans.append(Span(name="all", start=0.0, end=whole, text=format_ratio(whole), tone=""))
    svg = span_chart(
        spans,
        title="From the baseline to all switches",
        description="Training throughput relative to the baseline: each switch alone, their interaction, all switches.",
        axis=Axis(name="throughput relative to the baseline", format=format_number),
    )
    note = (
        "Each bar is the ratio of one switch alone. “Interaction” is the remaining ratio when all are on: below 1, the "
        "switches save some of the same time."
    )
    return [Chart(title="From the baseline to all switches", svg=svg, note=note)]


def leave_one_out(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """The loss when one switch is turned off and all others are on."""
    everything = variants[-1]
    spans = []
    for switch in Switch:
        kept = everything.switches - {switch}
        without = next((v for v in variants if v.switches == kept and 1 < len(kept) < len(everything.switches)), None)
        if without is None:
            continue
        ratio = speed_ratio(everything, without)
        if ratio is not None:
            tone = "good" if ratio >= 1 else "bad"
            spans.append(Span(name=f"without {switch}", start=1.0, end=ratio, text=format_ratio(ratio), tone=tone))
    if not spans:
        return []
    svg = span_chart(
        spans,
        title="Gain of each switch when all others are on",
        description="Throughput with all switches relative to all but one, one bar per switch.",
        axis=Axis(name="all switches relative to all but one", format=format_number),
    )
    note = "Above 1, the switch helps even when all others are on."
    return [Chart(title="Gain of each switch when all others are on", svg=svg, note=note)]


@dataclass(frozen=True, kw_only=True)
class _Column:
    title: str
    figure: str
    format: Callable[[float], str]


COLUMNS = (
    _Column(title="Samples/s", figure="samples_per_s", format=format_compact),
    _Column(title="AUC", figure="auc", format=format_metric),
    _Column(title="Peak memory", figure="peak_memory_bytes", format=format_bytes),
    _Column(title="On disk", figure="data_bytes", format=format_bytes),
    _Column(title="Network per sample", figure="wire_bytes_per_sample", format=format_bytes),
    _Column(title="CPU s per million", figure="cpu_seconds_per_million", format=format_number),
    _Column(title="Waiting for data", figure="stall_share", format=format_share),
)


def variants_table(variants: Sequence[MeasuredVariant]) -> PageTable:
    baseline, target = variants[0], target_auc(variants)
    rows = []
    for variant in variants:
        ratios = turn_ratios(variant, baseline)
        spread = f" ({format_ratio(min(ratios))} to {format_ratio(max(ratios))})" if len(ratios) > 1 else ""
        ratio = speed_ratio(variant, baseline)
        seconds = None if target is None else variant.seconds_to(target)
        rows.append(
            [
                Cell(text=variant.name),
                Cell(text=value_cell(ratio, format_ratio).text + spread, sort=ratio),
                *(value_cell(variant.median(column.figure), column.format) for column in COLUMNS),
                value_cell(seconds, format_seconds),
            ]
        )
    return PageTable(
        columns=["Variant", "Relative to baseline", *(column.title for column in COLUMNS), "Time to AUC"],
        rows=rows,
        numeric=frozenset(range(1, len(COLUMNS) + 3)),
        note="Medians of the repeats. “Time to AUC” is the training time until the held-out AUC was within "
        f"{TOLERANCE:g} of the baseline's final AUC; a dash means never. Network bytes were counted at the network "
        "interface during training.",
    )


def predictions(variants: Sequence[MeasuredVariant]) -> list[PageBlock]:
    """The bytes per step that the plans predicted, and the bytes that the network carried."""
    rows = []
    for variant in variants:
        predicted, measured = (variant.median(f"{which}_bytes_per_step") for which in ("predicted", "measured"))
        if predicted is not None and measured:
            error = predicted / measured - 1
            cells = [format_bytes(predicted), format_bytes(measured), f"{error:+.0%}"]
            sorts = (predicted, measured, abs(error))
            numbers = [Cell(text=text, sort=sort) for text, sort in zip(cells, sorts, strict=True)]
            rows.append([Cell(text=variant.name), *numbers])
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


def switch_names(variants: Sequence[MeasuredVariant]) -> str:
    named = "; ".join(f"{switch}: {switch.label}" for switch in Switch if switch in variants[-1].switches)
    return f"Switches: {named}."


def ablation_lines(variants: Sequence[MeasuredVariant]) -> list[str]:
    """The table for a terminal."""
    table = variants_table(variants)
    rows = [list(table.columns), *([cell.text for cell in row] for row in table.rows)]
    return text_table(rows)


def ablation_json(variants: Sequence[MeasuredVariant]) -> list[dict[str, Any]]:
    """The variants as JSON: medians, ratio to the baseline with its spread, seconds to the AUC."""
    baseline, target = variants[0], target_auc(variants)
    found = []
    for variant in variants:
        ratios = turn_ratios(variant, baseline)
        found.append(
            {
                "name": variant.name,
                "switches": sorted(variant.switches),
                "ratio": speed_ratio(variant, baseline),
                "spread": [min(ratios), max(ratios)] if ratios else None,
                "median": {column.figure: variant.median(column.figure) for column in COLUMNS},
                "seconds_to_auc": None if target is None else variant.seconds_to(target),
            }
        )
    return found
