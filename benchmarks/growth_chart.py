"""Draw seconds and memory against samples and rows, on log axes: one self-contained SVG.

    python benchmarks/growth_chart.py RESULT.json [PATH]     # default: docs/images/growth.svg

RESULT.json was written by growth.py. The dashed lines have the slope 1, which is linear.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from growth import STEPS
from markupsafe import Markup
from pss_chart import LEGEND_WIDTH, LINE, STYLE, legend_entry

from recmill.report.drawing.charts import HEIGHT, WIDTH, Axis, Reference, Series, line_block
from recmill.report.drawing.svg import Legend, tag

NAMES = [step for step in STEPS if step != "generate"]
FIGURES = {"seconds": (1.0, "s"), "peak_bytes": (1e9, "GB of memory")}
LEGEND_TOP, LEGEND_STEP = 52, 18


def panel(axis: str, figure: str, logs: list[dict[str, Any]]) -> Markup:
    """One figure of every step over one axis."""
    scale, unit = FIGURES[figure]
    lines = [
        Series(
            legend=Legend.of(step, place),
            points=[(float(log[axis]), log["steps"][step][figure] / scale) for log in logs],
            has_dots=True,
        )
        for place, step in enumerate(NAMES)
    ]
    values = [y for line in lines for _, y in line.points]
    low, high, most = min(values) * 0.8, max(values) * 1.25, logs[-1][axis] / logs[0][axis]
    top = min(high, low * most)
    linear = Reference(name="linear", points=((logs[-1][axis] * low / top, low), (float(logs[-1][axis]), top)))
    return line_block(
        lines,
        title=f"{figure} over {axis}",
        description="both axes are logarithmic",
        x=Axis(name=axis, is_log=True, format=lambda value: f"{value / 1e6:g}M"),
        y=Axis(name=unit, is_log=True, low=low, high=high, format=lambda value: f"{value:g}"),
        references=[linear],
    ).svg


def draw(result: dict[str, Any]) -> Markup:
    """Four panels and their legend."""
    known = {(log["samples"], log["rows"]): log for log in result["cells"]}
    panels = []
    for column, (axis, sizes) in enumerate(result["sweeps"].items()):
        logs = [known[size["samples"], size["rows"]] for size in sizes if (size["samples"], size["rows"]) in known]
        for row, figure in enumerate(FIGURES):
            place = {"x": column * WIDTH, "y": row * HEIGHT, "width": WIDTH, "height": HEIGHT}
            panels.append(tag("svg", panel(axis, figure, logs), **place))
    entries = [
        tag(
            "g",
            legend_entry(Legend.of(step, place), LEGEND_TOP + LEGEND_STEP * place),
            transform=f"translate({WIDTH:g})",
        )
        for place, step in enumerate(NAMES)
    ]
    box = f"0 0 {2 * WIDTH + LEGEND_WIDTH:g} {len(FIGURES) * HEIGHT:g}"
    style = tag("style", Markup(STYLE + LINE))
    return tag("svg", style, *panels, *entries, xmlns="http://www.w3.org/2000/svg", viewBox=box)


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    default = Path(__file__).parent.parent / "docs" / "images" / "growth.svg"
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    path.write_text(f"{draw(result)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
