"""SVG as text; all text from the data is escaped."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup, escape

NUM_COLOURS = 6  # `--c1` to `--c6` in page.css
# After six colours the line style changes, so that a seventh series differs from the first.
DASHES = ("", "6 3", "2 3")


def tag(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """One element. `class_` becomes class, `stroke_width` becomes stroke-width; None attributes are omitted."""
    # One Markup at the end: Markup.format per attribute took two thirds of the time of a page.
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(round(value, 2) if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def label(text: str, x: float, y: float, *, class_: str = "tick", anchor: str = "start") -> Markup:
    return tag("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def drawing(
    *children: Markup, width: float, height: float, title: str, description: str, class_: str, **attributes: str | float
) -> Markup:
    """A drawing that scales with the page and has a description for screen readers."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
        class_=class_,
        **attributes,
    )


def shorten(text: str, num_characters: int) -> str:
    return text if len(text) <= num_characters else text[: num_characters - 1] + "…"


@dataclass(frozen=True, kw_only=True)
class Legend:
    """One legend entry: name, colour and line style."""

    name: str
    colour: int  # 1 to NUM_COLOURS, 0 for grey
    dash: str = ""

    @classmethod
    def of(cls, name: str, position: int) -> Legend:
        return cls(name=name, colour=position % NUM_COLOURS + 1, dash=DASHES[position // NUM_COLOURS % len(DASHES)])
