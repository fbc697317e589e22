"""The training: loss, AUC, ROC, final metrics, and whether ingestion kept up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recmill.report.data import best_auc
from recmill.report.drawing.blocks import Cell, Facts, Note, PageTable, Section, first_open, missing_notes
from recmill.report.drawing.charts import Axis, Bar, PageBlock, Point, Reference, Series, bar_block, line_block
from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run, in_order, mapping, number, pairs, records
from recmill.report.units import format_compact, format_metric, format_named, format_number, format_share, readable_name

MAX_POINTS = 120  # per line: a chart has no room for more
SAMPLES = Axis(name="samples", format=format_compact, low=0.0)


def training_section(runs: Sequence[Run]) -> Section:
    blocks = missing_notes(runs, "training")
    if trained := [run for run in runs if "training" in run.parts]:
        blocks += [loss_chart(runs), auc_chart(runs), roc_chart(runs), metrics_table(trained)]
    return Section(id="training", title="Training", blocks=blocks)


def training_points(run: Run, part: str, x: str, y: str) -> list[Point]:
    """(x, y) of the entries of a part of the training result: its curve, its evaluations."""
    return pairs(records(run.part("training").get(part)), x, y)


def run_lines(runs: Sequence[Run], points_of: Callable[[Run], list[Point]], *, max_dots: int = 0) -> list[Series]:
    """One line per run that has points, with dots where they are few."""
    found = [(Legend.of(run.label, position), points_of(run)) for position, run in enumerate(runs)]
    return [
        Series(legend=legend, points=thin(points, MAX_POINTS), has_dots=len(points) <= max_dots)
        for legend, points in found
        if points
    ]


def loss_chart(runs: Sequence[Run]) -> PageBlock:
    points = {run.label: training_points(run, "curve", "samples", "loss") for run in runs}
    num_steps = -(-max(map(len, points.values())) // MAX_POINTS)
    lines = run_lines(runs, lambda run: bucket_means(points[run.label], MAX_POINTS))
    if not lines:
        return Note(text="No loss was recorded during training.")
    return line_block(
        lines,
        title="Training loss",
        description="Log loss on the training data by number of samples seen.",
        x=SAMPLES,
        y=Axis(name="log loss", format=format_number),
        note=f"Each point is the mean of up to {num_steps} recorded steps." if num_steps > 1 else "",
    )


def auc_chart(runs: Sequence[Run]) -> PageBlock:
    def points_of(run: Run) -> list[Point]:
        steps = training_points(run, "curve", "step", "samples")
        return [(samples_at(step, steps), auc) for step, auc in training_points(run, "evaluations", "step", "auc")]

    lines = run_lines(runs, points_of, max_dots=30)
    if not lines:
        return Note(text="No AUC was recorded during training.")
    best = {value for run in runs if "training" in run.parts and (value := best_auc(run)) is not None}
    return line_block(
        lines,
        title="AUC on held-out data",
        description="Area under the ROC curve at each evaluation by number of samples seen.",
        x=SAMPLES,
        y=Axis(name="AUC", format=format_metric),
        # Runs on different data have different best values: a single line would be wrong for some of them.
        references=[Reference(name="best reachable", value=best.pop())] if len(best) == 1 else [],
    )


def roc_chart(runs: Sequence[Run]) -> PageBlock:
    def points_of(run: Run) -> list[Point]:
        roc = mapping(run.part("training").get("roc"))
        if not all(isinstance(roc.get(name), list) for name in ("fpr", "tpr")):
            return []
        return pairs([{"x": x, "y": y} for x, y in zip(roc["fpr"], roc["tpr"], strict=False)], "x", "y")

    lines = run_lines(runs, points_of)
    if not lines:
        return Note(text="No ROC curve was recorded.")
    return line_block(
        lines,
        title="ROC on held-out data",
        description="True positive rate by false positive rate; the dashed diagonal is random guessing.",
        x=Axis(name="false positive rate", format=format_share, low=0.0, high=1.0),
        y=Axis(name="true positive rate", format=format_share, low=0.0, high=1.0),
        references=[Reference(name="random guessing", points=((0.0, 0.0), (1.0, 1.0)))],
        height=440,
    )


def bucket_means(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` points, each the mean of consecutive points, so that every step counts."""
    size = max(-(-len(points) // count), 1)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket)) for bucket in buckets]


def thin(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` of the points, including the first and the last."""
    if len(points) <= count:
        return list(points)
    return [points[round(position * (len(points) - 1) / (count - 1))] for position in range(count)]


def samples_at(step: float, steps: Sequence[Point]) -> float:
    """Samples seen by a step, from the loss curve; the step itself if there is no curve."""
    if not steps:
        return step
    place = min(bisect_left([known for known, _ in steps], step), len(steps) - 1)
    known_step, samples = steps[place]
    # The curve may be sparser than the evaluations; all steps have the same size, so interpolate.
    return samples * step / known_step if known_step else samples


def metrics_table(runs: Sequence[Run]) -> PageTable:
    """Final metrics and size of each model."""
    names = {
        "AUC": ("metrics", "auc"),
        "Log loss": ("metrics", "log_loss"),
        "Normalised entropy": ("metrics", "normalised_entropy"),
        "Evaluated samples": ("metrics", "num_samples"),
        "Samples trained": ("num_samples",),
        "Steps": ("num_steps",),
        "Processes": ("world_size",),
        "Training time": ("seconds",),
        "Samples/s": ("samples_per_s",),
        "Peak memory": ("peak_memory_bytes",),
        "Dense parameters": ("model", "num_dense_parameters"),
        "Embedding parameters": ("model", "num_embedding_parameters"),
        "Embedding tables": ("model", "embedding_bytes"),
    }
    rows = []
    for title, keys in names.items():
        values = [run.number("training", *keys) for run in runs]
        if any(value is not None for value in values):
            rows.append([Cell(text=title), *(Cell(text=format_named(keys[-1], value), sort=value) for value in values)])
    columns = ["", *(run.label for run in runs)]
    numeric = frozenset(range(1, len(columns)))
    return PageTable(
        title="Final results", columns=columns, rows=rows, numeric=numeric, is_wide=len(runs) > 3, is_sortable=False
    )


def ingestion_section(runs: Sequence[Run]) -> Section:
    known = [run for run in runs if mapping(run.part("training").get("ingest"))]
    blocks: list[PageBlock] = [
        Note(text=f"{run.label} has no ingestion statistics.") for run in runs if run not in known
    ]
    return Section(
        id="ingestion",
        title="Ingestion",
        intro="A stage that is always busy is the bottleneck; a trainer that waits lacks data. "
        "The numbers are those of the first process.",
        blocks=[*blocks, *first_open(known, "Ingestion", ingestion_blocks)],
    )


def ingestion_blocks(run: Run) -> list[PageBlock]:
    stats = {name: mapping(entry) for name, entry in in_order(mapping(run.part("training").get("ingest"))).items()}
    # Besides the stages there are the consumer (how long it waited) and the memory.
    stages = {name: entry for name, entry in stats.items() if "workers" in entry}
    named = {
        readable_name(f"{name}_{key}"): format_named(key, value)
        for name, entry in stats.items()
        for key, value in entry.items()
        if name not in stages and number(value) is not None
    }
    if (stall := run.stall_share) is not None:
        named = {"Trainer waited": format_share(stall), **named}
    blocks: list[PageBlock] = [*busy_chart(stages), *([stages_table(stages)] if stages else []), *tuning_blocks(run)]
    return [*blocks, Facts(title="Trainer and memory", pairs=named)] if named else blocks


def tuning_blocks(run: Run) -> list[PageBlock]:
    """What the online tuner did: workers per stage and rows per second during training."""
    history = records(run.part("training").get("tuning"))
    if not history:
        return []
    stages = list(in_order({stage: 0 for entry in history for stage in mapping(entry.get("workers"))}))
    seconds = Axis(name="seconds", format=format_number, low=0.0)
    workers = []
    for position, stage in enumerate(stages):
        entries = [{"t": entry.get("t"), "count": mapping(entry.get("workers")).get(stage)} for entry in history]
        points = thin(pairs(entries, "t", "count"), MAX_POINTS)
        workers.append(Series(legend=Legend.of(stage, position), points=points))
    marks = [
        (t, rate, str(entry["event"]))
        for entry in history
        if entry.get("event") and (t := number(entry.get("t"))) is not None
        if (rate := number(entry.get("rows_per_s"))) is not None
    ]
    points = thin(pairs(history, "t", "rows_per_s"), MAX_POINTS)
    return [
        line_block(
            workers,
            title="Workers over time",
            description="Workers of each ingestion stage during training, one line per stage.",
            x=seconds,
            y=Axis(name="workers", format=format_number, low=0.0),
            legend=[line.legend for line in workers],
        ),
        line_block(
            [Series(legend=Legend(name="rows/s", colour=1), points=points, marks=marks)],
            title="Rows per second over time",
            description="Rows per second that ingestion delivered during training.",
            x=seconds,
            y=Axis(name="rows/s", format=format_compact, low=0.0),
            note="Rings mark events that the tuner detected." if marks else "",
        ),
    ]


STAGE_KEYS = ("workers", "busy_share", "rows_per_s", "cpu_seconds", "bytes")


def stages_table(stages: Mapping[str, Mapping[str, Any]]) -> PageTable:
    keys = [key for key in STAGE_KEYS if any(number(entry.get(key)) is not None for entry in stages.values())]
    rows = []
    for stage, entry in stages.items():
        values = [number(entry.get(key)) for key in keys]
        cells = [Cell(text=format_named(key, value), sort=value) for key, value in zip(keys, values, strict=True)]
        rows.append([Cell(text=stage), *cells])
    columns = ("Stage", *(readable_name(key) for key in keys))
    numeric = frozenset(range(1, len(columns)))
    return PageTable(title="Stages", columns=columns, rows=rows, numeric=numeric, is_wide=False)


def busy_chart(stages: Mapping[str, Mapping[str, Any]]) -> list[PageBlock]:
    bars = [
        Bar(name=stage, values=[value], text=format_share(value))
        for stage, entry in stages.items()
        if (value := number(entry.get("busy_share"))) is not None
    ]
    axis = Axis(name="share of the time", format=format_share, high=1.0)
    told = "Share of the time that the workers of each ingestion stage were busy."
    return [bar_block(bars, title="How busy each stage was", description=told, axis=axis)] if bars else []
