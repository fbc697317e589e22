"""A comparison of variants in MLflow: one parent run, one nested run per variant, with the names of the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recmill.tracking.server import connect, log_params, log_points, open_experiment

PARENT = "mlflow.parentRunId"


def log_comparison(
    variants: Sequence[Mapping[str, Any]],
    *,
    name: str,
    tracking_uri: str,
    params: Mapping[str, Any],
    page: str | Path,
) -> str:
    """Write the variants ({"name", "switches", "ratio", "median": {...}}) and the page; returns the parent run's id."""
    experiment_id = open_experiment(tracking_uri)
    with connect(tracking_uri) as client:
        parent = str(client.create_run(experiment_id, run_name=name).info.run_id)
        log_params(client, parent, params)
        for variant in variants:
            nested = client.create_run(experiment_id, run_name=variant["name"], tags={PARENT: parent})
            run_id = str(nested.info.run_id)
            log_params(client, run_id, {"switches": " ".join(variant["switches"]) or "none"})
            figures = {**variant["median"], "ratio": variant["ratio"], "seconds_to_auc": variant["seconds_to_auc"]}
            log_points(client, run_id, [(key, value, 0, time.time()) for key, value in figures.items()])
            client.set_terminated(run_id, status="FINISHED")
        best = max((variant["ratio"] or 0.0 for variant in variants), default=0.0)
        log_points(client, parent, [("best_ratio", best, 0, time.time())])
        client.log_artifact(parent, str(page))
        client.set_terminated(parent, status="FINISHED")
    return parent
