"""SVG as text, with everything escaped that we did not write ourselves."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup, escape

NUM_COLOURS = 6  # `--c1` to `--c6` in page.css
# After the six colours the line style changes, so that a seventh series is not mistaken for the first.
DASHES = ("", "6 3", "2 3")


def tag(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """One element. `class_` means class, `stroke_width` means stroke-width; attributes that are None are left out."""
    # One Markup at the end: Markup.format on every attribute made up two thirds of the time of a page.
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
    """A whole picture that scales with the page and says to a screen reader what it shows."""
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
    """One entry beside a chart: which colour and line style is what."""

    name: str
    colour: int  # 1 to NUM_COLOURS, 0 for grey
    dash: str = ""

    @classmethod
    def of(cls, name: str, position: int) -> Legend:
        return cls(name=name, colour=position % NUM_COLOURS + 1, dash=DASHES[position // NUM_COLOURS % len(DASHES)])
