"""The table of docs/data.md that lists every key of log.yaml.

To write it again: python -m tests.unit.data.preparation.key_table
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from recmill.data.preparation import spec

PAGE = Path(__file__).parents[4] / "docs" / "data.md"
# Where each record stands in a log.yaml, in reading order.
PLACES = {
    "LogSpec": "",
    "SourceSpec": "sources.NAME",
    "TimeSpec": "time, valid_from",
    "EventsSpec": "events",
    "SessionSpec": "events.session",
    "SamplesSpec": "samples",
    "Condition": "where[]",
    "JoinSpec": "joins[]",
    "OutcomeSpec": "outcomes[]",
    "LabelSpec": "labels[]",
    "NegativesSpec": "negatives",
    "FeatureSpec": "features[]",
    "HistorySpec": "features[].history",
    "RowsSpec": "features[].rows",
    "ChecksSpec": "checks",
}


def records() -> dict[str, Any]:
    """All records of log.yaml by name."""
    return {name: kind for name, kind in vars(spec).items() if is_dataclass(kind) and kind.__module__ == spec.__name__}


def key_table() -> str:
    rows = ["| key | meaning |", "|---|---|"]
    for name, place in PLACES.items():
        for own in fields(records()[name]):
            path = f"{place}.{own.name}" if place and ", " not in place else own.name
            path = f"{place.replace(', ', ' / ')}: {own.name}" if ", " in place else path
            needed = " Required." if own.default is MISSING else ""
            rows.append(f"| `{path}` | {own.metadata['about']}{needed} |".replace("|...", "..."))
    return "\n".join(rows)


def between(name: str) -> str:
    found = re.search(
        rf"<!-- {name}: begin -->\n(.*?)\n?<!-- {name}: end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found
    return found[1]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- keys: begin -->\n", "<!-- keys: end -->"
    before, after = text.split(start)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{start}{key_table()}\n{end}{after}", encoding="utf-8")
