"""Draw AUC against bytes: one self-contained SVG per data set.

    python benchmarks/pss_chart.py RESULT.json [FOLDER]     # writes FOLDER/pss-<data>.svg (default: docs)

RESULT.json was written by pss.py or pss_curve.py. A point is the median over seeds; bytes include optimiser state.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from recmill.report.drawing.charts import WIDTH, Axis, Reference, Series, line_block
from recmill.report.drawing.svg import Legend, label, tag

COLOURS = ("#848f9b", "#0072b2", "#e06000", "#0a5c36", "#5b2a86", "#3399ee", "#bb7788")  # those of the report
STYLE = "text{font:12px sans-serif;fill:#55616f}.grid{stroke:#dfe4ea}.base,.reference{stroke:#848f9b}" + "".join(
    f".c{number}{{stroke:{colour};fill:{colour}}}" for number, colour in enumerate(COLOURS)
)
LEGEND_WIDTH = 130.0
LINE = ".line{fill:none;stroke-width:2}.reference{stroke-dasharray:4 4}"


def draw(data: str, curve: list[dict[str, Any]]) -> Markup:
    """The curve of one data set: one line per method, the full table as a horizontal line."""
    points: dict[str, list[tuple[float, float]]] = {}
    for entry in sorted(curve, key=lambda entry: entry["bytes"]):
        points.setdefault(entry["way"], []).append((float(entry["bytes"]), statistics.median(entry["best"])))
    full = {"full": "full table, Adam", "full adagrad": "full table, row-wise Adagrad"}
    best = max((points[name][0][1], text) for name, text in full.items() if name in points)
    reference = [Reference(name=best[1], value=best[0])]
    names = sorted(set(points) - set(full))
    lines = [
        Series(legend=Legend.of(name, place), points=points[name], has_dots=True) for place, name in enumerate(names)
    ]
    seeds = min(len(entry["best"]) for entry in curve)
    picture = line_block(
        lines,
        title=f"AUC against bytes, {data}",
        description=f"test AUC where the validation split is best, median of {seeds} seeds or more",
        x=Axis(name="bytes of weights and optimiser state", is_log=True, format=lambda value: f"{value:,.0f}"),
        y=Axis(name="AUC", format=lambda value: f"{value:.3f}"),
        references=reference,
    ).svg
    entries = [legend_entry(line.legend, 52 + 18 * place) for place, line in enumerate(lines)]
    size = Markup('<svg xmlns="http://www.w3.org/2000/svg" width="{}" ').format(f"{WIDTH + LEGEND_WIDTH:g}")
    opened = (
        str(picture)
        .replace("<svg ", str(size), 1)
        .replace(f'viewBox="0 0 {WIDTH:g} ', f'viewBox="0 0 {WIDTH + LEGEND_WIDTH:g} ', 1)
    )
    end = opened.index(">") + 1
    style = tag("style", Markup(STYLE + LINE))
    return Markup(opened[:end] + str(style) + opened[end:].replace("</svg>", "".join(map(str, entries)) + "</svg>"))


def legend_entry(legend: Legend, y: float) -> Markup:
    """One entry of the legend, to the right of the chart."""
    dash = {"stroke-dasharray": legend.dash} if legend.dash else {}
    stroke = tag("line", x1=WIDTH + 8, x2=WIDTH + 32, y1=y - 4, y2=y - 4, class_=f"line c{legend.colour}", **dash)
    return tag("g", stroke, label(legend.name, WIDTH + 40, y))


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent.parent / "docs"
    for data in dict.fromkeys(entry["data"] for entry in result["curves"]):
        own = [entry for entry in result["curves"] if entry["data"] == data]
        (folder / f"pss-{data}.svg").write_text(str(draw(data, own)) + "\n")


if __name__ == "__main__":
    main()
