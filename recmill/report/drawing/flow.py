"""The pipeline as boxes and arrows, with the time of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from recmill.report.drawing.svg import drawing, label, shorten, tag

# Column and row of each step in the wide form: planning, tuning and the baseline all come before the training step.
PLACES: Mapping[str, tuple[float, float]] = {
    "generate_data": (0, 0),
    "profile_access": (1, 0),
    "plan_shards": (2, 0),
    "tune_ingest": (1.5, 1),
    "train_model": (3, 0),
    "report": (4, 0),
}
ARROWS = (
    ("prepare_log", "generate_data"),
    ("generate_data", "profile_access"),
    ("profile_access", "plan_shards"),
    ("generate_data", "tune_ingest"),
    ("plan_shards", "train_model"),
    ("tune_ingest", "train_model"),
    ("generate_data", "train_baseline"),
    ("train_baseline", "train_model"),
    ("train_model", "train_shared"),
    ("train_shared", "report"),
)
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 178.0, 104.0, 42.0, 24.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One box of the flow."""

    step: str
    title: str
    time: str = ""  # "" if the step was not recorded
    share: float = 0.0  # of the total time of all stages
    lines: Sequence[str] = ()  # rows/s, bytes


def flow_chart(stages: Sequence[Stage], *, title: str, description: str) -> Markup:
    """Both forms of the flow; the style sheet shows the one that fits the page's width."""
    wide = draw_wide(stages, title=title, description=description)
    return wide + draw_tall(stages, title=title, description=description)


def places_of(stages: Sequence[Stage]) -> dict[str, tuple[float, float]]:
    """Where each stage is drawn; unknown steps follow at the end."""
    steps = [stage.step for stage in stages]
    known = dict(PLACES)
    if "train_baseline" in steps:
        known |= {"train_baseline": (2, 1), "tune_ingest": (1, 2)}
    if "train_shared" in steps:
        known |= {"train_shared": (4, 0), "report": (5, 0)}
    if "prepare_log" in steps:
        known = {step: (column + 1, row) for step, (column, row) in known.items()} | {"prepare_log": (0, 0)}
    last = max(column for column, _ in known.values())
    others = [step for step in steps if step not in known]
    return {step: known[step] if step in known else (last + 1 + others.index(step), 0) for step in steps}


def draw_wide(stages: Sequence[Stage], *, title: str, description: str) -> Markup:
    """Left to right, in the direction of the data."""
    places = places_of(stages)
    corners = {
        step: (1 + column * (BOX_WIDTH + GAP_X), 1 + row * (BOX_HEIGHT + GAP_Y))
        for step, (column, row) in places.items()
    }
    boxes = [draw_box(stage, *corners[stage.step], BOX_WIDTH) for stage in stages]
    wires = [*ARROWS, *([] if "train_shared" in corners else [("train_model", "report")])]
    arrows = [draw_arrow(corners[a], corners[b]) for a, b in wires if a in corners and b in corners]
    width = max(x for x, _ in corners.values()) + BOX_WIDTH + 1
    height = max(y for _, y in corners.values()) + BOX_HEIGHT + 1
    return drawing(
        *arrows, *boxes, width=width, height=height, title=title, description=description, class_="flow wide"
    )


def draw_arrow(start: tuple[float, float], end: tuple[float, float]) -> Markup:
    """From one box to another: straight within a row, with a bend where the row changes."""
    (x1, y1), (x2, y2) = start, end
    middle, head = y1 + BOX_HEIGHT / 2, (x2 - 1, y2 + BOX_HEIGHT / 2, 0)
    if y2 > y1:
        path = f"M{x1 + BOX_WIDTH / 2:g} {y1 + BOX_HEIGHT:g}V{y2 + BOX_HEIGHT / 2 - 8:g}q0 8 8 8H{x2 - 6:g}"
    elif y2 < y1:
        corner_x, tip_y = x2 + BOX_WIDTH / 2, y2 + BOX_HEIGHT
        path = f"M{x1 + BOX_WIDTH:g} {middle:g}H{corner_x - 8:g}q8 0 8 -8V{tip_y + 6:g}"
        head = (corner_x, tip_y + 1, -90)
    else:
        path = f"M{x1 + BOX_WIDTH:g} {middle:g}H{x2 - 6:g}"
    place = "translate({:g} {:g}) rotate({})".format(*head)
    tip = tag("path", d="M0 0L-8 -4.5L-8 4.5Z", transform=place, class_="head")
    return tag("g", tag("path", d=path, class_="wire"), tip)


def draw_tall(stages: Sequence[Stage], *, title: str, description: str) -> Markup:
    """Top to bottom in the order of execution, for narrow pages."""
    width, gap = 340.0, 14.0
    marks = []
    for position, stage in enumerate(stages):
        top = 1 + position * (BOX_HEIGHT + gap)
        if position:
            marks.append(tag("path", d=f"M{width / 2:g} {top - gap:g}V{top:g}", class_="wire"))
        marks.append(draw_box(stage, 1, top, width - 2))
    height = len(stages) * (BOX_HEIGHT + gap) - gap + 2
    return drawing(*marks, width=width, height=height, title=title, description=description, class_="flow tall")


def draw_box(stage: Stage, x: float, y: float, width: float) -> Markup:
    is_recorded = bool(stage.time)
    marks = [
        tag("rect", x=x, y=y, width=width, height=BOX_HEIGHT, rx=8.0, class_="box" if is_recorded else "box missing"),
        label(stage.title, x + 14, y + 24, class_="stage"),
        label(stage.time or "not recorded", x + 14, y + 48, class_="time" if is_recorded else "tick"),
    ]
    marks += [
        label(shorten(text, 26), x + 14, y + 67 + 16 * line, class_="tick") for line, text in enumerate(stage.lines[:2])
    ]
    if is_recorded:
        length = width - 28
        bar = {"x": x + 14, "y": y + BOX_HEIGHT - 11, "height": 4.0, "rx": 2.0}
        marks.append(tag("rect", width=length, class_="track", **bar))
        share = tag("title", f"{stage.share:.0%} of the total time")
        marks.append(tag("rect", share, width=max(length * stage.share, 2.0), class_="bar c1", **bar))
    return tag("g", *marks)
