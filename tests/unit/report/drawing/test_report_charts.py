import xml.etree.ElementTree as ElementTree

import pytest
from markupsafe import Markup

from recmill.report.drawing.charts import Axis, Bar, Chart, Reference, Series, bar_block, line_block
from recmill.report.drawing.flow import Stage, flow_chart, places_of
from recmill.report.drawing.svg import NUM_COLOURS, Legend, tag


def parse(drawn: Markup | Chart) -> ElementTree.Element:
    return ElementTree.fromstring(str(drawn.svg if isinstance(drawn, Chart) else drawn))


def by_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def one_line(points: list[tuple[float, float]], **options: object) -> ElementTree.Element:
    series = [Series(legend=Legend.of("loss", 0), points=points)]
    return parse(
        line_block(
            series, title="Loss", description="By samples.", x=Axis(name="samples"), y=Axis(name="loss"), **options
        )
    )


def test_text_and_attributes_are_escaped() -> None:
    element = parse(tag("text", "<b> & 'c'", data_name='"x" <y>'))
    assert element.text == "<b> & 'c'"
    assert element.get("data-name") == '"x" <y>'


def test_a_chart_says_what_it_shows() -> None:
    root = one_line([(0, 1), (10, 0.5)])
    assert root[0].tag == "title"
    assert root[0].text == "Loss"
    assert root[1].text == "By samples."
    assert root.get("role") == "img"


def test_every_point_has_a_tooltip_inside_the_picture() -> None:
    root = one_line([(0, 1.0), (5, 0.75), (10, 0.5)])
    points = by_class(root, "pt")
    assert [point[0].text for point in points] == [
        "loss: 1 at 0 samples",
        "loss: 0.75 at 5 samples",
        "loss: 0.5 at 10 samples",
    ]
    x0, y0, width, height = (float(value) for value in root.get("viewBox", "").split())
    for point in points:
        assert x0 <= float(point.get("cx", "nan")) <= width
        assert y0 <= float(point.get("cy", "nan")) <= height


def test_larger_values_stand_higher_and_further_right() -> None:
    first, last = by_class(one_line([(0, 1.0), (10, 3.0)]), "pt")
    assert float(last.get("cx", "")) > float(first.get("cx", ""))
    assert float(last.get("cy", "")) < float(first.get("cy", ""))


@pytest.mark.parametrize("points", [[(1, 1)], [(3, 0.5), (3, 0.5)], [(0, 0), (0, 0)]])
def test_a_chart_of_one_place_is_drawn(points: list[tuple[float, float]]) -> None:
    assert len(by_class(one_line(points), "line")) == 1


def test_a_chart_without_points_says_so() -> None:
    assert "not recorded" in "".join(one_line([]).itertext())


def test_a_reference_widens_the_axis_until_it_is_seen() -> None:
    root = one_line([(0, 0.7), (10, 0.75)], references=[Reference(name="best reachable", value=0.81)])
    line = by_class(root, "reference")[0]
    top = float(line.get("y1", ""))
    assert 34 <= top < min(float(point.get("cy", "")) for point in by_class(root, "pt"))


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar(name=name, values=[value], text=str(value)) for name, value in (("a", 4.0), ("b", 2.0), ("c", 0.0))]
    root = parse(bar_block(bars, title="T", description="D", legend=[Legend.of("x", 0)], axis=Axis(name="n")))
    widths = [float(bar.get("width", "")) for bar in by_class(root, "bar")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02)
    assert widths[2] == 0


def test_stacked_parts_stand_side_by_side() -> None:
    bars = [Bar(name="history", values=[0.25, 0.5], text="75%")]
    legend = [Legend.of("unchanged", 0), Legend.of("shifted", 1)]
    root = parse(bar_block(bars, title="T", description="D", legend=legend, axis=Axis(name="share", high=1.0)))
    first, second = by_class(root, "bar")
    end = float(first.get("x", "")) + float(first.get("width", ""))
    assert float(second.get("x", "")) == pytest.approx(end + 2, abs=0.02)


def test_the_seventh_series_differs_from_the_first_by_its_line() -> None:
    first, seventh = Legend.of("a", 0), Legend.of("g", NUM_COLOURS)
    assert first.colour == seventh.colour
    assert first.dash != seventh.dash


def test_the_flow_marks_a_stage_that_was_not_recorded() -> None:
    stages = [
        Stage(step="generate_data", title="Generate data", time="2 s", share=1.0),
        Stage(step="train_model", title="Train"),
    ]
    wide, tall = parse(Markup("<div>") + flow_chart(stages, title="T", description="D") + Markup("</div>"))
    for drawing in (wide, tall):
        assert len(by_class(drawing, "box")) == 2
        assert len(by_class(drawing, "missing")) == 1
        assert "not recorded" in "".join(drawing.itertext())


def test_a_prepared_log_is_drawn_in_front_and_moves_the_rest() -> None:
    steps = ("generate_data", "profile_access", "train_baseline", "train_model", "report")
    stages = [Stage(step=step, title=step) for step in ("prepare_log", *steps)]
    without, places = places_of(stages[1:]), places_of(stages)
    assert places["prepare_log"] == (0, 0)
    assert {step: places[step] for step in steps} == {step: (x + 1, y) for step, (x, y) in without.items()}


def test_a_step_the_flow_does_not_know_is_drawn_inside_the_picture() -> None:
    stages = [
        Stage(step=step, title=step, time="1 s")
        for step in ("generate_data", "train_model", "my_step", "my_other_step")
    ]
    wide, _ = parse(Markup("<div>") + flow_chart(stages, title="T", description="D") + Markup("</div>"))
    width = float(wide.get("viewBox", "").split()[2])
    boxes = by_class(wide, "box")
    assert len({box.get("x") for box in boxes}) == 4
    assert all(float(box.get("x", "")) + float(box.get("width", "")) <= width for box in boxes)
