"""The top of the page: what ran, headline numbers, the comparison of runs, the pipeline with its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from recmill.report.comparison import ComparedFigure, bytes_per_sample, compare_runs, total_seconds
from recmill.report.data import best_auc
from recmill.report.drawing.blocks import Card, Cards, Cell, Details, Note, PageTable, Section, first_open, value_cell
from recmill.report.drawing.charts import Axis, Bar, Chart, PageBlock, bar_block
from recmill.report.drawing.flow import Stage, flow_chart
from recmill.report.drawing.svg import NUM_COLOURS, Legend
from recmill.report.runs import OPTIONAL_STEPS, STEPS, Run, mapping, number
from recmill.report.units import (
    format_bytes,
    format_compact,
    format_count,
    format_metric,
    format_named,
    format_ratio,
    format_seconds,
    format_share,
    readable_name,
)


def lede(runs: Sequence[Run]) -> str:
    """The summary of the page in one or two sentences."""
    if len(runs) > 1:
        others = ", ".join(run.label for run in runs[1:])
        return f"{others} compared with {runs[0].label}, the baseline. A ratio above 1 is better."
    run = runs[0]
    samples, ranks = run.number("training", "num_samples"), run.number("training", "world_size")
    if samples is None:
        return "This run has no training result; the page shows the other parts."
    model = str(mapping(run.part("training").get("model")).get("name") or "model").upper()
    text = f"{model} trained on {format_count(samples)} samples"
    if ranks:
        text += f" by {processes(ranks)}"
    seconds = run.number("training", "seconds")
    return text + (f" in {format_seconds(seconds)}." if seconds is not None else ".")


def processes(count: float) -> str:
    return f"{format_count(count)} process{'' if count == 1 else 'es'}"


def training_note(run: Run) -> str:
    ranks, stall = run.number("training", "world_size"), run.stall_share
    parts = [processes(ranks) if ranks else "", f"{format_share(stall)} waiting for data" if stall is not None else ""]
    return ", ".join(part for part in parts if part)


def steps_note(run: Run) -> str:
    """The time spent in steps, and the time that their processes took to start."""
    seconds, startup = (
        sum(number(step.get(name)) or 0.0 for step in run.steps.values()) for name in ("seconds", "startup_seconds")
    )
    text = f"{format_seconds(seconds)} in {len(run.steps)} steps" if run.steps else ""
    return text + (f", start-up {format_seconds(startup)}" if startup else "")


def started(run: Run) -> str:
    """The start time of the run in UTC; "" if it was not recorded."""
    times = [run.number("run", "started_at"), *(number(step.get("started_at")) for step in run.steps.values())]
    known = [time for time in times if time is not None]
    return f"{datetime.fromtimestamp(min(known), tz=UTC):%d %B %Y, %H:%M} UTC" if known else ""


def headline(runs: Sequence[Run]) -> Cards:
    return Cards(cards=run_cards(runs[0]) if len(runs) == 1 else comparison_cards(runs))


def run_cards(run: Run) -> list[Card]:
    auc, best = run.number("training", "metrics", "auc"), best_auc(run)
    entropy, speed = run.number("training", "metrics", "normalised_entropy"), run.number("training", "samples_per_s")
    size, each = run.data_bytes, bytes_per_sample(run)
    memory, tables = run.number("training", "peak_memory_bytes"), run.number("training", "model", "embedding_bytes")
    whole = total_seconds(run)
    loss = run.number("training", "metrics", "log_loss")
    cards = [
        ("AUC, held-out data", auc, format_metric, "", best and f"best reachable {format_metric(best)}"),
        ("Normalised entropy", entropy, format_metric, "", loss and f"log loss {format_metric(loss)}"),
        ("Training throughput", speed, format_compact, "samples/s", training_note(run)),
        ("Data on disk", size, format_bytes, "", each and f"{format_bytes(each)} per sample"),
        ("Peak memory", memory, format_bytes, "", tables and f"{format_bytes(tables)} in embedding tables"),
        ("Whole run", whole, format_seconds, "", steps_note(run)),
    ]
    return [
        Card(label=name, value=value_cell(value, style).text, unit=unit if value is not None else "", note=note or "")
        for name, value, style, unit, note in cards
    ]


def comparison_cards(runs: Sequence[Run]) -> list[Card]:
    """The best run for each main figure, with its value and its ratio to the baseline."""
    wanted = ("samples_per_s", "auc", "normalised_entropy", "data_bytes", "peak_memory_bytes", "total_seconds")
    table = {row[0].figure.key: row for row in compare_runs(runs)}
    cards = []
    for key in wanted:
        known = [(cell, run) for cell, run in zip(table.get(key, []), runs, strict=False) if cell.value is not None]
        if not known:
            continue
        cell, run = max(known, key=lambda pair: pair[0].ratio or 0.0)
        unit = cell.figure.unit if cell.figure.unit == "samples/s" else ""
        if len(known) > 1 and len({other.value for other, _ in known}) == 1:
            note, change, tone = "the same in every run", "", ""
        elif run is runs[0]:
            note, change, tone = "the baseline is best", "", ""
        else:
            note, change, tone = run.label, cell.change, cell.tone
        cards.append(Card(label=cell.figure.title, value=cell.text, unit=unit, note=note, change=change, tone=tone))
    return cards


def comparison_section(runs: Sequence[Run]) -> Section:
    rows = [
        [Cell(text=row[0].figure.name), *(comparison_cell(cell, n > 0) for n, cell in enumerate(row))]
        for row in compare_runs(runs)
    ]
    table = PageTable(
        columns=["", *(run.label for run in runs)],
        rows=rows,
        numeric=frozenset(range(1, len(runs) + 1)),
        is_sortable=False,
        note=f"Next to each value: its ratio to {runs[0].label} (above 1 is better); for AUC, log loss and entropy the "
        "difference. Every run was measured once: small changes may be noise and are shown in grey.",
    )
    return Section(id="comparison", title="Comparison with the baseline", blocks=[*comparison_charts(runs), table])


def comparison_cell(cell: ComparedFigure, is_compared: bool) -> Cell:
    change, tone = (cell.change, cell.tone) if is_compared else ("", "")
    return Cell(text=cell.text, change=change, tone=tone)


def comparison_charts(runs: Sequence[Run]) -> list[PageBlock]:
    is_known = any(run.number("training", "samples_per_s") is not None for run in runs)
    return [*([throughput_chart(runs, of="every run", has_ratios=True)] if is_known else []), *time_chart(runs)]


def throughput_chart(runs: Sequence[Run], *, of: str, has_ratios: bool = False) -> PageBlock:
    """Samples per second, one bar per run; on request with the ratio to the first."""
    bars = []
    first = runs[0].number("training", "samples_per_s")
    for position, run in enumerate(runs):
        speed = run.number("training", "samples_per_s")
        if speed is not None:
            ratio = f" · {format_ratio(speed / first)}" if has_ratios and position and first else ""
            colour = Legend.of(run.label, position).colour
            bars.append(Bar(name=run.label, values=[speed], text=format_compact(speed) + ratio, colour=colour))
    told = f"Training throughput of {of}, in samples per second."
    axis = Axis(name="samples/s", format=format_compact)
    return bar_block(bars, title="Training throughput", description=told, axis=axis)


def time_chart(runs: Sequence[Run]) -> list[PageBlock]:
    """Seconds per stage, stacked, one bar per run."""
    steps = list(dict.fromkeys(step for run in runs for step in run.steps))
    # The neighbouring chart uses the first colours for runs.
    legend = [
        Legend(name=readable_name(step), colour=(position + 3) % NUM_COLOURS + 1) for position, step in enumerate(steps)
    ]
    bars = []
    for run in runs:
        seconds = [number(run.steps.get(step, {}).get("seconds")) or 0.0 for step in steps]
        titles = [f"{run.label}, {entry.name}: {format_seconds(s)}" for entry, s in zip(legend, seconds, strict=True)]
        if sum(seconds):
            bars.append(Bar(name=run.label, values=seconds, titles=titles, text=format_seconds(sum(seconds))))
    if not bars:
        return []
    axis = Axis(name="seconds, all stages", format=format_seconds)
    told = "Seconds per stage, stacked, one bar per run."
    return [bar_block(bars, title="Time per stage", description=told, legend=legend, axis=axis)]


def pipeline_section(runs: Sequence[Run], cards: Sequence[Cards] = ()) -> Section:
    timed = [run for run in runs if run.steps]
    blocks = [*cards, *first_open(timed, "Pipeline", pipeline_blocks)]
    if untimed := [run.label for run in runs if not run.steps]:
        blocks.append(Note(text=f"No step times were recorded (steps/*.json): {', '.join(untimed)}."))
    return Section(
        id="pipeline",
        title="What ran",
        intro="Each box is a step; the bar at the bottom is its share of the time.",
        blocks=blocks,
    )


def pipeline_blocks(run: Run) -> list[PageBlock]:
    stages = [
        stage_of(run, step)
        for step in dict.fromkeys((*STEPS, *run.steps))
        if step in run.steps or step not in ("report", *OPTIONAL_STEPS)
    ]
    told = "; ".join(f"{stage.title}: {stage.time or 'not recorded'}" for stage in stages)
    flow = Chart(title="", svg=flow_chart(stages, title=f"Pipeline of {run.label}", description=told), is_wide=True)
    rows = [
        [
            Cell(text=readable_name(step)),
            Cell(text=readable_name(name)),
            Cell(text=format_named(name, value), sort=number(value)),
        ]
        for step, record in run.steps.items()
        for name, value in mapping(record.get("metrics")).items()
    ]
    table = PageTable(columns=("Step", "Metric", "Value"), rows=rows, numeric=frozenset({2}))
    return (
        [flow, Details(summary=f"All metrics recorded by the steps ({len(rows)})", blocks=[table])] if rows else [flow]
    )


def stage_of(run: Run, step: str) -> Stage:
    record = run.steps.get(step, {})
    seconds = number(record.get("seconds"))
    total = sum(number(each.get("seconds")) or 0.0 for each in run.steps.values())
    startup = number(record.get("startup_seconds"))
    begun = f"start-up {format_seconds(startup)}" if startup is not None else ""
    lines = [line for line in (stage_rate(run, step, seconds), stage_bytes(run, step), begun) if line]
    return Stage(
        step=step,
        title=readable_name(step),
        time="" if seconds is None else format_seconds(seconds),
        share=(seconds or 0.0) / total if total else 0.0,
        lines=lines if seconds is not None else (),
    )


def stage_rate(run: Run, step: str, seconds: float | None) -> str:
    """The rate that the step recorded; otherwise its rows divided by its time."""
    metrics = mapping(run.steps.get(step, {}).get("metrics"))
    for name in preferred(metrics, "rows_per_s", "samples_per_s", ending="_per_s"):
        what = name.removesuffix("_per_s").replace("num_", "").replace("_", " ")
        return f"{format_compact(metrics[name])} {what}/s"
    rows = {
        "generate_data": run.number("dataset", "num_rows"),
        "profile_access": run.number("profile", "num_samples"),
        "train_model": run.number("training", "num_samples"),
    }.get(step)
    return f"{format_compact(rows / seconds)} rows/s" if rows and seconds else ""


def stage_bytes(run: Run, step: str) -> str:
    metrics = mapping(run.steps.get(step, {}).get("metrics"))
    for name in preferred(metrics, "written_bytes", "data_bytes", ending="bytes"):
        if "memory" not in name:
            what = name.removesuffix("bytes").replace("_", " ")
            return f"{format_bytes(metrics[name])} {what}".strip()
    if step == "generate_data" and run.data_bytes is not None:
        return f"{format_bytes(run.data_bytes)} written"
    if step == "train_model" and (tables := run.number("training", "model", "embedding_bytes")) is not None:
        return f"{format_bytes(tables)} of tables"
    return ""


def preferred(metrics: Mapping[str, Any], *first: str, ending: str) -> list[str]:
    """Names of the numbers with this ending, the given ones first."""
    found = [name for name, value in metrics.items() if name.endswith(ending) and number(value) is not None]
    return sorted(found, key=lambda name: first.index(name) if name in first else len(first))
