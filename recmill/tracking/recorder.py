"""The MLflow run of one step: opened, filled and closed by `MlflowRecorder`, or described in a `Journal` for later.

Loading MLflow and opening its database costs two seconds of CPU time in every process that does it. The steps of a
local run therefore write a journal, and the process that runs the pipeline replays it (replay.py). On a cluster, every
step talks to the server itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recmill.tracking.database import create_database
from recmill.tracking.models import find_version, log_model, mark_version
from recmill.tracking.server import (
    TAG_RUN_ID,
    Point,
    RunReference,
    explain_tracking_errors,
    find_run,
    impatient,
    load_mlflow,
    log_params,
    log_points,
)

JOURNAL_FOLDER = "RECMILL_JOURNAL"  # environment variable: where the steps of a local run leave their journals
REFERENCE = "run.json"  # in that folder: the MLflow run, for steps that start after it was opened
SYSTEM_SAMPLING_S = 1.0  # with MLflow's default of 10 s, short steps would have no sample


class Journal:
    """A recorder that writes its calls to a file, one JSON line per call."""

    def __init__(self, folder: str | Path, *, step: str, inputs: Mapping[str, Any]) -> None:
        self._path = Path(folder, f"{step}-{os.getpid()}.jsonl")
        self._write("enter", step=step, inputs=dict(inputs))

    def params(self, params: Mapping[str, Any]) -> None:
        self._write("params", params=dict(params))

    def points(self, points: Iterable[Point]) -> None:
        self._write("points", points=list(points))

    def dataset(self, *, name: str, digest: str, tags: Mapping[str, str], context: str) -> None:
        self._write("dataset", name=name, digest=digest, tags=dict(tags), context=context)

    def model(self, *, folder: str, name: str, quality: Mapping[str, float]) -> dict[str, str]:
        self._write("model", folder=folder, name=name, quality=dict(quality))
        return {}  # MLflow has not named the model yet

    def stage(self, *, name: str, version: str, stage: str, reason: str, replaces: str) -> None:
        self._write("stage", name=name, version=version, stage=stage, reason=reason, replaces=replaces)

    def leave(self, *, status: str, metrics: Mapping[str, float]) -> None:
        self._write("leave", status=status, metrics=dict(metrics))

    def _write(self, call: str, **arguments: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([call, arguments], default=str) + "\n")


class MlflowRecorder:
    """A recorder whose calls reach MLflow at once. Several may be open if each has a thread of its own."""

    def __init__(
        self,
        step: str,
        *,
        tracking_uri: str,
        parent_run_id: str,
        inputs: Mapping[str, Any],
        pipeline_run_id: str | None = None,
    ) -> None:
        """Open the run of a step; `tracking.steps` says which run is its parent. The pipeline run is that of KFP."""
        mlflow = load_mlflow()
        mlflow.set_tracking_uri(tracking_uri)
        mlflow.set_system_metrics_sampling_interval(SYSTEM_SAMPLING_S)
        pipeline_run_id = os.environ.get("KFP_RUN_ID", "") if pipeline_run_id is None else pipeline_run_id
        # Removed from the environment: otherwise start_run would resume that run instead of nesting a new one.
        resumed = os.environ.pop("MLFLOW_RUN_ID", "")
        with explain_tracking_errors(tracking_uri), impatient():
            create_database(mlflow, tracking_uri)
            if not parent_run_id and not resumed and pipeline_run_id:
                parent_run_id = find_run(tracking_uri, pipeline_run_id=pipeline_run_id).run_id
            self._client = mlflow.MlflowClient(tracking_uri)
            active = mlflow.start_run(
                run_id=None if parent_run_id else resumed or None,
                experiment_id=self._client.get_run(parent_run_id).info.experiment_id if parent_run_id else None,
                run_name=step,
                parent_run_id=parent_run_id or None,
                log_system_metrics=True,
            )
            mlflow.set_tags({"recmill.step": step} | ({TAG_RUN_ID: pipeline_run_id} if pipeline_run_id else {}))
            log_params(self._client, active.info.run_id, inputs)
        self.parent_run_id = parent_run_id
        self.run = RunReference(
            tracking_uri=tracking_uri, experiment_id=active.info.experiment_id, run_id=active.info.run_id
        )

    def params(self, params: Mapping[str, Any]) -> None:
        log_params(self._client, self.run.run_id, params)

    def points(self, points: Iterable[Point]) -> None:
        log_points(self._client, self.run.run_id, points)

    def dataset(self, *, name: str, digest: str, tags: Mapping[str, str], context: str) -> None:
        import mlflow
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset

        source = CodeDatasetSource(tags=dict(tags))
        mlflow.log_input(MetaDataset(source=source, name=name, digest=digest), context=context)

    def model(self, *, folder: str, name: str, quality: Mapping[str, float]) -> dict[str, str]:
        return log_model(folder, name=name, quality=quality)

    def stage(self, *, name: str, version: str, stage: str, reason: str, replaces: str) -> None:
        found = version or find_version(self._client, name, parent_run_id=self.parent_run_id)
        mark_version(self._client, name, found, stage=stage, reason=reason, replaces=replaces)

    def leave(self, *, status: str, metrics: Mapping[str, float]) -> None:
        import mlflow

        with explain_tracking_errors(self.run.tracking_uri):
            try:
                self.points([(name, value, 0, time.time()) for name, value in metrics.items()])
            finally:
                mlflow.end_run(status)


Recorder = Journal | MlflowRecorder  # what a step tells MLflow: both have the same methods
