"""The first screen of a run with a baseline: what all switches gained together, and what each of them did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recmill.report.ablation import TOLERANCE, time_to_auc
from recmill.report.comparison import ComparedFigure, Figure, training_figure
from recmill.report.drawing.blocks import Cell, PageTable, Section
from recmill.report.drawing.charts import Axis, PageBlock, Reference, line_block
from recmill.report.overview import comparison_cell, throughput_chart
from recmill.report.runs import Run, load_beside, mapping, number, records
from recmill.report.training import run_lines, training_points
from recmill.report.units import (
    DASH,
    NBSP,
    format_bytes,
    format_compact,
    format_metric,
    format_number,
    format_ratio,
    format_seconds,
    format_share,
    text_table,
)
from recmill.training.switches import Switch

Z = 2.0  # standard errors within which two AUCs count as equal

WHAT_IT_DOES = {
    Switch.DEDUP: "Lists that repeat within a session are stored, read and trained once.",
    Switch.TIERS: "Rows that are read often are kept on every process, so that fewer rows travel.",
    Switch.HOT_BATCHES: "Samples that need only popular rows are trained apart, without any exchange of rows.",
    Switch.SHARING: "Rows that are read rarely share one small array: another, much smaller model.",
    Switch.TUNING: "Workers that read the data move to the slowest stage while training runs.",
}


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """A run, the baseline trained beside it, and the variant with shared parameters if there is one.

    Their labels are those that the page gives them: "all switches", "baseline", "shared parameters".
    """

    run: Run
    baseline: Run
    shared: Run | None = None

    @property
    def columns(self) -> list[Run]:
        return [self.baseline, self.run, *([self.shared] if self.shared else [])]

    @property
    def target_auc(self) -> float | None:
        """The AUC that trainings are timed to reach: the baseline's last one less the tolerance."""
        found = auc_of(self.baseline)
        return None if found is None else found - TOLERANCE


def find_trainings(run: Run) -> Trainings | None:
    """A run with the trainings beside it; None if no baseline was trained."""
    baseline, shared = load_beside(run, "baseline"), load_beside(run, "shared", label="shared parameters")
    return Trainings(run=replace(run, label="all switches"), baseline=baseline, shared=shared) if baseline else None


def auc_of(run: Run) -> float | None:
    return run.number("training", "metrics", "auc")


def auc_error(run: Run) -> float | None:
    """The standard error of the AUC: as it was measured, else Hanley and McNeil's for independent samples."""
    measured = run.number("training", "metrics", "standard_errors", "auc")
    if measured is not None:
        return measured
    auc, rate, count = (run.number("training", "metrics", key) for key in ("auc", "base_rate", "num_samples"))
    if auc is None or not rate or not count or rate >= 1:
        return None
    positives, negatives = rate * count, (1 - rate) * count
    both_above, both_below = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (positives - 1) * (both_above - auc**2) + (negatives - 1) * (both_below - auc**2)
    return math.sqrt(max(spread, 0.0) / (positives * negatives))


def seconds_to_auc(run: Run, target: float | None) -> float | None:
    points = training_points(run, "evaluations", "seconds", "auc")
    return None if target is None else time_to_auc({"evaluations": points}, target)


def per_sample(run: Run, key: str, num_samples: float = 1) -> float | None:
    used, samples = (run.number("training", "usage", name) for name in (key, "num_samples"))
    return used / samples * num_samples if used is not None and samples else None


def table_bytes(run: Run) -> float | None:
    """Bytes of rows, optimiser state and indexes on the process that holds most."""
    sizes = [size for size in map(number, run.part("plan").get("rank_bytes") or []) if size is not None]
    return max(sizes, default=None)


def figure_rows(trainings: Trainings) -> list[Figure]:
    def figure(title: str, read: Callable[[Run], float | None], style: Callable[[float], str]) -> Figure:
        return Figure(key="", title=title, read=read, format=style)

    return [
        training_figure("samples_per_s", "Samples per second", format_compact, more_is_better=True),
        figure("Time to the baseline's AUC", lambda run: seconds_to_auc(run, trainings.target_auc), format_seconds),
        figure("Data on disk", lambda run: run.data_bytes, format_bytes),
        figure("Sent between processes, per sample", lambda run: per_sample(run, "wire_bytes"), format_bytes),
        training_figure("peak_memory_bytes", "Peak memory per process", format_bytes),
        figure("Tables per process", table_bytes, format_bytes),
        figure("CPU seconds per million samples", lambda run: per_sample(run, "cpu_seconds", 1e6), format_number),
    ]


def compare(figure: Figure, run: Run, baseline: Run) -> ComparedFigure:
    return ComparedFigure(figure=figure, value=figure.read(run), baseline=figure.read(baseline))


def gains_section(trainings: Trainings) -> Section:
    """The section that opens the page of a run with a baseline."""
    return Section(
        id="gains",
        title="Gains",
        blocks=[
            figures_table(trainings),
            switches_table(trainings),
            throughput_chart(trainings.columns, of="every training"),
            auc_by_time(trainings),
            *([shared_table(trainings, trainings.shared)] if trainings.shared else []),
        ],
    )


def figures_table(trainings: Trainings) -> PageTable:
    return PageTable(
        title="Baseline against all switches",
        columns=["", "Baseline", "All switches"],
        rows=figures_of(trainings, [trainings.run]),
        numeric=frozenset({1, 2}),
        is_wide=False,
        is_sortable=False,
        note="The same log, model, seed, epochs and processes, each measured once: changes in grey may be noise. "
        "Ratios above 1 are better. AUC with its standard error. The time to the baseline's AUC ends at the first "
        f"evaluation within {TOLERANCE:g} of it; a dash means never.",
    )


def shared_table(trainings: Trainings, shared: Run) -> PageTable:
    return PageTable(
        title="Baseline against shared parameters",
        columns=["", "Baseline", "Shared parameters"],
        rows=figures_of(trainings, [shared]),
        numeric=frozenset({1, 2}),
        is_wide=False,
        is_sortable=False,
        note="Another model: its tables share one small array. The other switches are as above.",
    )


def figures_of(trainings: Trainings, compared: Sequence[Run]) -> list[list[Cell]]:
    """The figures of the baseline and of the trainings that are compared with it, one row each."""
    runs = [trainings.baseline, *compared]
    rows = [figure_cells(row, runs) for row in figure_rows(trainings)]
    rows.insert(2, auc_cells(runs))
    return [row for row in rows if any(cell.text != DASH for cell in row[1:])]


def figure_cells(figure: Figure, runs: Sequence[Run]) -> list[Cell]:
    compared = [comparison_cell(compare(figure, run, runs[0]), run is not runs[0]) for run in runs]
    return [Cell(text=figure.title), *compared]


def auc_cells(runs: Sequence[Run]) -> list[Cell]:
    cells = [Cell(text="AUC, held-out data")]
    for run in runs:
        change, tone = ("", "") if run is runs[0] else auc_change(run, runs[0])
        cells.append(Cell(text=auc_text(run), change=change, tone=tone))
    return cells


def auc_text(run: Run) -> str:
    auc, error = auc_of(run), auc_error(run)
    if auc is None:
        return DASH
    return format_metric(auc) + (f" ± {format_metric(error)}" if error is not None else "")


def auc_change(run: Run, baseline: Run) -> tuple[str, str]:
    """The difference to the baseline's AUC; grey within two standard errors of the difference."""
    ours, theirs = auc_of(run), auc_of(baseline)
    if ours is None or theirs is None:
        return "", ""
    errors = [auc_error(run), auc_error(baseline)]
    noise = Z * math.hypot(*(error or 0.0 for error in errors))
    difference = ours - theirs
    tone = "" if abs(difference) <= noise else "good" if difference > 0 else "bad"
    return f"{difference:+.4f}".replace("-", "−"), tone


def auc_by_time(trainings: Trainings) -> PageBlock:
    lines = run_lines(trainings.columns, lambda run: training_points(run, "evaluations", "seconds", "auc"), max_dots=30)
    target = trainings.target_auc
    return line_block(
        lines,
        title="AUC on held-out data by training time",
        description="Area under the ROC curve at each evaluation, by seconds of training, one line per training.",
        x=Axis(name="seconds of training", format=format_number, low=0.0),
        y=Axis(name="AUC", format=format_metric),
        references=[Reference(name="the baseline's AUC, less 0.002:", value=target)] if target is not None else [],
    )


def switches_table(trainings: Trainings) -> PageTable:
    """One row per switch: what it does, whether it was on, and what it gained on this data."""
    decided = decisions_by_switch(trainings.run)
    rows = []
    for switch in Switch:
        entry = decided.get(switch.value, {})
        state = state_of(switch, entry, trainings)
        rows.append(
            [
                Cell(text=switch.label[:1].upper() + switch.label[1:], note=WHAT_IT_DOES[switch]),
                Cell(text="", change=state, tone="good" if state == "on" else ""),
                Cell(text=gain_of(switch, entry, trainings)),
            ]
        )
    return PageTable(
        title="What each one gained",
        columns=["Optimisation", "", "What it gained here"],
        rows=rows,
        is_wide=False,
        is_sortable=False,
        is_prose=True,
    )


def decisions_by_switch(run: Run) -> dict[str, Mapping[str, Any]]:
    return {str(entry.get("switch")): entry for entry in records(run.part("training").get("decisions"))}


def state_of(switch: Switch, entry: Mapping[str, Any], trainings: Trainings) -> str:
    if entry.get("is_on"):
        return "on"
    return "variant" if switch == Switch.SHARING and trainings.shared else "off"


def gain_of(switch: Switch, entry: Mapping[str, Any], trainings: Trainings) -> str:
    """What the switch gained, in words: its own trial, what was measured of it, and why it is on or off."""
    if not entry:
        return "This run did not record what it decided."
    reason = str(entry.get("reason") or "")
    if switch == Switch.SHARING and trainings.shared:
        return shared_gain(trainings)
    if not entry.get("is_on"):
        is_chosen = entry.get("setting") == "auto" and entry.get("source") != "setting"
        return f"Off, because it does not pay on this data: {reason}." if is_chosen else f"Off: {reason}."
    measured = {
        Switch.DEDUP: stored_gain(trainings),
        Switch.HOT_BATCHES: hot_share(trainings.run),
        Switch.TUNING: waiting(trainings),
    }.get(switch, "")
    ratio = number(entry.get("ratio"))
    trial = f"{format_ratio(ratio)} samples/s in a trial on this data." if ratio is not None else ""
    why = f"{reason[:1].upper()}{reason[1:]}." if reason else ""
    return " ".join(part for part in (trial, measured, why) if part)


def stored_gain(trainings: Trainings) -> str:
    ours, theirs = trainings.run.data_bytes, trainings.baseline.data_bytes
    if ours is None or theirs is None or trainings.run.part("dataset").get("layout") != "deduplicated":
        return ""
    return f"{format_bytes(ours)} on disk instead of {format_bytes(theirs)} ({format_ratio(theirs / ours)})."


def hot_share(run: Run) -> str:
    batches = mapping(mapping(run.part("training").get("hot")).get("batches"))
    hot, cold = number(batches.get("hot")), number(batches.get("cold"))
    if hot is None or cold is None or not hot + cold:
        return ""
    return f"{format_share(hot / (hot + cold))} of the batches needed no exchange of rows."


def waiting(trainings: Trainings) -> str:
    ours, theirs = trainings.run.stall_share, trainings.baseline.stall_share
    if ours is None or theirs is None:
        return ""
    return f"Training waited for data {format_share(ours)} of the time (baseline: {format_share(theirs)})."


def shared_gain(trainings: Trainings) -> str:
    shared = trainings.shared
    assert shared is not None
    ours, theirs = table_bytes(shared), table_bytes(trainings.baseline)
    size = ""
    if ours and theirs:
        size = f"Tables of {format_bytes(ours)} instead of {format_bytes(theirs)} per process. "
    change, _ = auc_change(shared, trainings.baseline)
    auc = auc_of(shared)
    return f"{size}AUC {format_metric(auc)} ({change} against the baseline)." if auc is not None else size


def gains_lede(trainings: Trainings) -> str:
    """The page in one sentence: how much faster, at which AUC."""
    speed = compare(figure_rows(trainings)[0], trainings.run, trainings.baseline).ratio
    if speed is None:
        return ""
    ours, theirs = auc_text(trainings.run), auc_text(trainings.baseline)
    on = [entry for entry in decisions_by_switch(trainings.run).values() if entry.get("is_on")]
    how = f"{len(on)} of {len(Switch)} optimisations on" if on else "no optimisation on"
    return f"{format_ratio(speed)} the baseline's samples per second; AUC {ours} against {theirs}; {how}."


def decision_lines(run: Run) -> list[str]:
    """One line per switch for a terminal: on or off, and why."""
    width = max(len(switch) for switch in Switch)
    found = decisions_by_switch(run)
    told = [(switch, found[switch]) for switch in Switch if switch in found]
    return [
        f"{switch:<{width}}  {'on' if entry.get('is_on') else 'off':<3}  {entry.get('reason')}"
        for switch, entry in told
    ]


def gains_lines(trainings: Trainings) -> list[str]:
    """Baseline and run side by side for a terminal."""
    compared = figures_of(trainings, trainings.columns[1:])
    rows = [[f"{cell.text}  {cell.change}" if cell.change else cell.text for cell in row] for row in compared]
    rows.insert(0, ["", *(run.label.capitalize() for run in trainings.columns)])
    return [line.replace(NBSP, " ") for line in text_table(rows)]
