"""How a step passes its outputs on: references, not bulk data.

The data lies in RUN/ (a folder, a volume or an object store), written by recmill. The KFP artifact carries
`metadata["path"]` and `metadata["content_hash"]`, and its own file is that same reference as JSON. `artifact.uri` stays
as KFP chose it: kfp's local runner accepts any URI, but the cluster's launcher uploads what a changed URI names, fails
if that is in no bucket it knows, and downloads all of it again before each consumer starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def publish(output: Any, reference: Mapping[str, str]) -> None:
    """Make a KFP output artifact point to what recmill wrote."""
    output.metadata.update(reference)
    with open(output.path, "w", encoding="utf-8") as file:
        json.dump(dict(reference), file, indent=2, sort_keys=True)


def path_of(artifact: Any) -> str:
    """The path of an artifact that another step published."""
    return str(artifact.metadata["path"])


def write_table(output: Any, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill a KFP Markdown artifact with one table: one row per entry, one column per plain value."""
    columns = list(dict.fromkeys(key for row in rows.values() for key, value in row.items() if _is_plain(value)))
    lines = [f"## {title}", "", "| name | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for name, row in rows.items()]
    with open(output.path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def log_numbers(output: Any, metrics: Mapping[str, float]) -> None:
    """Fill a KFP Metrics artifact, which the UI shows and compares."""
    for name, value in metrics.items():
        output.log_metric(name, value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "").replace("|", "\\|")
