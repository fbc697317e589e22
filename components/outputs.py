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


def log_numbers(output: Any, metrics: Mapping[str, float]) -> None:
    """Fill a KFP Metrics artifact, which the UI shows and compares."""
    for name, value in metrics.items():
        output.log_metric(name, value)
