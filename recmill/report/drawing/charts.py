"""The charts of the report: lines, bars and stacked bars, as inline SVG.

Colours come from the page's style sheet (`class="c1"` ...), so one drawing works in light and dark mode and in print.
Every mark has a <title>: browsers show it as a tooltip, screen readers read it, and the page's script collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from recmill.report.drawing.scales import Scale, padded_range
from recmill.report.drawing.svg import Legend, drawing, label, shorten, tag
from recmill.report.units import format_number

Format = Callable[[float], str]
Point = tuple[float, float]

WIDTH, HEIGHT = 540.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 16.0, 34.0, 46.0
BAR_HEIGHT, BAR_GAP = 16.0, 10.0
BAR_LABELS = 132.0  # width of the names to the left of the bars
CHARACTER = 7.0  # approximate width of a letter or digit


@dataclass(frozen=True, kw_only=True)
class PageBlock:
    kind: ClassVar[str]
    is_wide: bool = True  # full width of the page, or half of it


@dataclass(frozen=True, kw_only=True)
class Chart(PageBlock):
    kind: ClassVar[str] = "chart"
    title: str
    svg: Markup
    legend: Sequence[Legend] = ()
    note: str = ""
    has_bars: bool = False  # the legend shows areas instead of lines
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line."""

    legend: Legend
    points: Sequence[Point]
    has_dots: bool = False  # draw the points, for lines with few of them such as evaluations
    marks: Sequence[tuple[float, float, str]] = ()  # highlighted points on the line: x, y, text


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The name of an axis, the format of its numbers, and its range (None: the range of the data)."""

    name: str
    format: Format = format_number
    is_log: bool = False
    low: float | None = None
    high: float | None = None

    def range(self, values: list[float], *, padded: bool) -> tuple[float, float]:
        low, high = padded_range(values) if padded else (min(values), max(values))
        low = low if self.low is None else self.low
        high = high if self.high is None else self.high
        return (low, high) if low < high else (low, low * 2 if low > 0 else low + 1)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference line across the chart, such as the best reachable AUC."""

    name: str
    points: tuple[Point, Point] | None = None  # None: horizontal at `value`
    value: float = 0.0


def line_block(
    series: Sequence[Series],
    *,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    references: Sequence[Reference] = (),
    height: float = HEIGHT,
    legend: Sequence[Legend] | None = None,
    note: str = "",
) -> Chart:
    """Lines with a common x axis, and their legend (default: all lines, none for a single line)."""
    lines = series if len(series) > 1 else ()
    legend = [line.legend for line in lines] if legend is None else legend
    xs = [point[0] for line in series for point in line.points]
    ys = [point[1] for line in series for point in line.points]
    ys += [reference.value for reference in references if reference.points is None]
    if not xs:
        return Chart(title=title, svg=empty_chart(title), legend=legend, note=note)
    x_low, x_high = x.range(xs, padded=False)
    y_low, y_high = y.range(ys, padded=True)
    x_scale = Scale(low=x_low, high=x_high, start=LEFT, end=WIDTH - RIGHT, is_log=x.is_log)
    y_scale = Scale(low=y_low, high=y_high, start=height - BOTTOM, end=TOP, is_log=y.is_log)
    svg = drawing(
        *draw_axes(x_scale, y_scale, x, y),
        *(mark for reference in references for mark in draw_reference(reference, x_scale, y_scale, y)),
        *(draw_line(line, x_scale, y_scale, x, y) for line in series),
        width=WIDTH,
        height=height,
        title=title,
        description=description,
        class_="chart lines",
    )
    return Chart(title=title, svg=svg, legend=legend, note=note)


def draw_axes(x_scale: Scale, y_scale: Scale, x: Axis, y: Axis) -> list[Markup]:
    bottom, right = y_scale.start, x_scale.end
    marks = [label(y.name, LEFT, 16, class_="axis"), label(x.name, right, bottom + 38, class_="axis", anchor="end")]
    for value in y_scale.ticks(5):
        place = y_scale(value)
        marks.append(tag("line", x1=LEFT, x2=right, y1=place, y2=place, class_="grid"))
        marks.append(label(y.format(value), LEFT - 8, place + 4, anchor="end"))
    for value in x_scale.ticks(6):
        place = x_scale(value)
        marks.append(tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="base"))
        # Centred on the edge, the last label would be cut off.
        anchor = "end" if place > right - 12 else "middle"
        marks.append(label(x.format(value), place, bottom + 18, anchor=anchor))
    marks.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="base"))
    return marks


def draw_reference(reference: Reference, x_scale: Scale, y_scale: Scale, y: Axis) -> list[Markup]:
    ends = reference.points or ((x_scale.low, reference.value), (x_scale.high, reference.value))
    (x1, y1), (x2, y2) = ((x_scale(px), y_scale(py)) for px, py in ends)
    marks = [tag("line", tag("title", reference.name), x1=x1, y1=y1, x2=x2, y2=y2, class_="reference")]
    if reference.points is None:
        marks.append(label(f"{reference.name} {y.format(reference.value)}", x2, y2 - 6, class_="tick", anchor="end"))
    return marks


def draw_line(line: Series, x_scale: Scale, y_scale: Scale, x: Axis, y: Axis) -> Markup:
    places = [(x_scale(px), y_scale(py)) for px, py in line.points]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    marks = [tag("path", d=path, class_="line", stroke_dasharray=line.legend.dash or None)]
    # A line with a single point would be invisible without a dot.
    radius, class_ = (3.5, "pt dot") if line.has_dots or len(places) == 1 else (5.0, "pt")
    for (px, py), (value_x, value_y) in zip(places, line.points, strict=True):
        text = f"{line.legend.name}: {y.format(value_y)} at {x.format(value_x)} {x.name}"
        marks.append(tag("circle", tag("title", text), cx=round(px, 1), cy=round(py, 1), r=radius, class_=class_))
    for value_x, value_y, text in line.marks:
        place_x, place_y = x_scale(value_x), y_scale(value_y)
        marks.append(tag("circle", tag("title", text), cx=place_x, cy=place_y, r=5.0, class_="mark"))
    return tag("g", *marks, class_=f"c{line.legend.colour}")


def empty_chart(title: str) -> Markup:
    text = label("not recorded", WIDTH / 2, 60, class_="axis", anchor="middle")
    return drawing(text, width=WIDTH, height=120, title=title, description="Not recorded.", class_="chart")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar, or one row of stacked parts."""

    name: str
    values: Sequence[float]  # one per legend entry
    text: str  # text to the right of the bar
    titles: Sequence[str] = field(default_factory=tuple)  # one per value; empty: name and value
    colour: int | None = None  # overrides the colour of the legend


def bar_block(
    bars: Sequence[Bar],
    *,
    title: str,
    description: str,
    legend: Sequence[Legend] = (),
    axis: Axis,
    reference: Reference | None = None,
) -> Chart:
    """Horizontal bars from zero; the values of one bar are stacked, and the legend names them."""
    if not bars:
        return Chart(title=title, svg=empty_chart(title), legend=legend, has_bars=True)
    high = axis.high or max(sum(bar.values) for bar in bars) or 1.0
    scale = Scale(low=0.0, high=high, start=BAR_LABELS, end=_bars_end([bar.text for bar in bars]))
    rows = [draw_bar(bar, top, scale, legend, axis) for bar, top in zip(bars, _tops(len(bars)), strict=True)]
    svg = draw_rows(rows, scale, axis, reference=reference, title=title, description=description)
    return Chart(title=title, svg=svg, legend=legend, has_bars=True)


def _bars_end(texts: Sequence[str]) -> float:
    """Where bars end, so that the texts to their right fit."""
    return WIDTH - 24 - CHARACTER * max(len(text) for text in texts)


def _tops(count: int) -> list[float]:
    return [8 + position * (BAR_HEIGHT + BAR_GAP) + BAR_GAP / 2 for position in range(count)]


def draw_rows(
    rows: Sequence[Markup], scale: Scale, axis: Axis, *, reference: Reference | None, title: str, description: str
) -> Markup:
    """Rows of bars over a common axis."""
    bottom = 8 + len(rows) * (BAR_HEIGHT + BAR_GAP)
    marks = []
    for value in scale.ticks(4):
        place = scale(value)
        marks.append(tag("line", x1=place, x2=place, y1=4.0, y2=bottom, class_="grid"))
        marks.append(label(axis.format(value), place, bottom + 16, anchor="middle"))
    marks += [label(axis.name, scale.end, bottom + 36, class_="axis", anchor="end"), *rows]
    marks.append(tag("line", x1=scale.start, x2=scale.start, y1=4.0, y2=bottom, class_="base"))
    if reference is not None:
        place = scale(reference.value)
        marks.append(
            tag("line", tag("title", reference.name), x1=place, x2=place, y1=4.0, y2=bottom, class_="reference")
        )
    return drawing(*marks, width=WIDTH, height=bottom + 44, title=title, description=description, class_="chart bars")


def draw_row(name: str, bars: Sequence[Markup], text: str, end: float, top: float) -> Markup:
    """The name of a row, its bars, and a text where they end."""
    middle = top + BAR_HEIGHT / 2 + 4
    how = {"x": BAR_LABELS - 8, "y": middle}
    named = tag("text", shorten(name, 17), tag("title", name), class_="name", text_anchor="end", **how)
    return tag("g", named, *bars, label(text, end + 8, middle, class_="value"))


def draw_bar(bar: Bar, top: float, scale: Scale, legend: Sequence[Legend], axis: Axis) -> Markup:
    marks, start = [], 0.0
    for position, value in enumerate(bar.values):
        end = min(start + value, scale.high)
        text = bar.titles[position] if bar.titles else f"{bar.name}: {axis.format(value)}"
        colour = bar.colour or (legend[position].colour if legend else 1)
        # Two pixels of background separate stacked parts without a border.
        width = max(scale(end) - scale(start) - (2 if position < len(bar.values) - 1 else 0), 0.0)
        shape = {"x": scale(start), "y": top, "width": width, "height": BAR_HEIGHT, "rx": 2.0}
        marks.append(tag("rect", tag("title", text), class_=f"bar c{colour}", **shape))
        start = end
    return draw_row(bar.name, marks, bar.text, scale(start), top)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A bar between two values: one step of a waterfall."""

    name: str
    start: float
    end: float
    text: str
    tone: str = ""  # "good", "bad", or "" for a total


def span_block(spans: Sequence[Span], *, title: str, description: str, axis: Axis, note: str) -> Chart:
    """Floating horizontal bars, as in a waterfall chart; the reference line is at 1."""
    values = [value for span in spans for value in (span.start, span.end)]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    low = 0.0 if low < 0.5 or any(span.start == 0.0 for span in spans) else low * 0.95
    end = _bars_end([span.text for span in spans])
    scale = Scale(low=low, high=high * 1.02 if high > low else low + 1, start=BAR_LABELS, end=end)
    rows = [draw_span(span, top, scale) for span, top in zip(spans, _tops(len(spans)), strict=True)]
    baseline = Reference(name="the baseline", value=1.0)
    svg = draw_rows(rows, scale, axis, reference=baseline, title=title, description=description)
    return Chart(title=title, svg=svg, note=note)


def draw_span(span: Span, top: float, scale: Scale) -> Markup:
    left, right = sorted((scale(span.start), scale(span.end)))
    # Blue for totals, green and orange for steps up and down; the text says the same without colour.
    colour = {"good": 3, "bad": 2}.get(span.tone, 1)
    text = tag("title", f"{span.name}: {span.text}")
    shape = {"x": left, "y": top, "width": max(right - left, 1.5), "height": BAR_HEIGHT, "rx": 2.0}
    bar = tag("rect", text, class_=f"bar c{colour}", **shape)
    return draw_row(span.name, [bar], span.text, right, top)
