"""The building blocks of a page. Python decides what the page contains; page.html.j2 decides how each block looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from recmill.report.drawing.charts import PageBlock
from recmill.report.runs import PARTS, Run
from recmill.report.units import DASH


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    sort: float | None = None  # sort key of the column; None: the text
    change: str = ""  # difference to the baseline
    tone: str = ""  # "good", "bad" or ""
    note: str = ""  # a second line in small letters
    bar: float | None = None  # a share, drawn as a bar in the cell


@dataclass(frozen=True, kw_only=True)
class PageTable(PageBlock):
    """Rows of cells with named columns; the columns in `numeric` are right-aligned."""

    kind: ClassVar[str] = "table"
    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: frozenset[int] = frozenset()
    note: str = ""
    is_sortable: bool = True
    is_prose: bool = False  # cells hold sentences: on a narrow page they stand below one another
    is_explained: bool = False  # the last cell of a row explains it: on a narrow page it stands below the others


@dataclass(frozen=True, kw_only=True)
class Card:
    label: str
    value: str
    unit: str = ""
    note: str = ""
    change: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Cards(PageBlock):
    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, kw_only=True)
class Facts(PageBlock):
    """Names and values, in as many columns as fit."""

    kind: ClassVar[str] = "facts"
    title: str = ""
    pairs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Note(PageBlock):
    """A plain sentence, usually about what is missing and why."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class Heading(PageBlock):
    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True, kw_only=True)
class Details(PageBlock):
    """Blocks that are collapsed until the reader opens them."""

    kind: ClassVar[str] = "details"
    summary: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True, kw_only=True)
class Section:
    id: str
    title: str
    blocks: Sequence[PageBlock]
    intro: str = ""


def text_cells(values: Sequence[str]) -> list[Cell]:
    return [Cell(text=value) for value in values]


def value_cell(value: float | None, style: Callable[[float], str]) -> Cell:
    return Cell(text=DASH if value is None else style(value), sort=value)


def heading(labels: str) -> list[PageBlock]:
    return [Heading(text=labels)] if labels else []


def part_blocks(runs: Sequence[Run], part: str, build: Callable[[Run], Sequence[PageBlock]]) -> list[PageBlock]:
    """The blocks of each distinct content of a part, under the names of the runs that share it.

    Runs of an ablation usually share data and profile: the page shows them once, without a heading if all runs do.
    """
    groups: list[tuple[Any, list[Run]]] = []
    for run in runs:
        if part not in run.parts:
            continue
        content = run.part(part).get("content_hash") or run.part(part)
        members = next((members for known, members in groups if known == content), None)
        if members is None:
            groups.append((content, [run]))
        else:
            members.append(run)
    blocks: list[PageBlock] = []
    for _, members in groups:
        labels = "" if len(members) == len(runs) else ", ".join(run.label for run in members)
        blocks += [*heading(labels), *build(members[0])]
    return blocks


def missing_notes(runs: Sequence[Run], *parts: str) -> list[PageBlock]:
    return [
        Note(text=f"{run.label} has no {PARTS[part][0]}.") for part in parts for run in runs if part not in run.parts
    ]


def first_open(runs: Sequence[Run], what: str, build: Callable[[Run], Sequence[PageBlock]]) -> list[PageBlock]:
    """The blocks of the first run, and those of the others collapsed."""
    blocks: list[PageBlock] = []
    for position, run in enumerate(runs):
        if position:
            blocks.append(Details(summary=f"{what} of {run.label}", blocks=build(run)))
        else:
            blocks += [*heading(run.label if len(runs) > 1 else ""), *build(run)]
    return blocks
