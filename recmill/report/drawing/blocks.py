"""What a page is made of. Python says what stands on the page; page.html.j2 says how each kind of block looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from recmill.report.drawing.svg import Legend
from recmill.report.runs import Run


@dataclass(frozen=True, kw_only=True)
class Block:
    kind: ClassVar[str]
    is_wide: bool = True  # the whole width of the page, or half of it


@dataclass(frozen=True, kw_only=True)
class Chart(Block):
    kind: ClassVar[str] = "chart"
    title: str
    svg: Markup
    legend: Sequence[Legend] = ()
    note: str = ""
    has_bars: bool = False  # the legend shows areas, not lines
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    sort: float | None = None  # what the column is sorted by; None: the text
    change: str = ""  # how it stands to the baseline
    tone: str = ""  # "good", "bad" or ""
    bar: float | None = None  # a share, drawn in the cell


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """Rows of cells under named columns; the columns in `numeric` are set flush right."""

    kind: ClassVar[str] = "table"
    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: frozenset[int] = frozenset()
    note: str = ""
    is_sortable: bool = True


@dataclass(frozen=True, kw_only=True)
class Card:
    label: str
    value: str
    unit: str = ""
    note: str = ""
    change: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Cards(Block):
    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, kw_only=True)
class Facts(Block):
    """Names and what they are, in as many columns as there is room for."""

    kind: ClassVar[str] = "facts"
    title: str = ""
    pairs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Note(Block):
    """A plain sentence: usually what is missing and why."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class Heading(Block):
    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True, kw_only=True)
class Details(Block):
    """Blocks that are folded away until somebody asks for them."""

    kind: ClassVar[str] = "details"
    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block]
    intro: str = ""


def text_cells(values: Sequence[str]) -> list[Cell]:
    return [Cell(text=value) for value in values]


def same_parts(runs: Sequence[Run], part: str) -> list[tuple[Run, str]]:
    """One run for each distinct content of a part, and which runs share it ("" if all do, so no heading is needed).

    An ablation usually shares its data and its profile: the page shows them once.
    """
    groups: list[tuple[Any, list[Run]]] = []
    for run in runs:
        if part not in run.parts:
            continue
        content = run.part(part).get("content_hash") or run.part(part)
        for known, members in groups:
            if known == content:
                members.append(run)
                break
        else:
            groups.append((content, [run]))
    shared_by_all = len(groups) == 1 and len(groups[0][1]) == len(runs)
    return [(members[0], "" if shared_by_all else ", ".join(run.label for run in members)) for _, members in groups]


def heading(labels: str) -> list[Block]:
    return [Heading(text=labels)] if labels else []
