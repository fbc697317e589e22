"""The MLflow run of a pipeline run: finding the server, opening and closing the run."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from recmill.artifacts import InputError, hide_credentials, is_remote
from recmill.tracking.database import SQLITE, create_database

EXPERIMENT = "recmill"
# Tag names of Kubeflow Pipelines' own MLflow plugin, so both kinds of run are found the same way.
TAG_RUN_ID = "kfp.pipeline_run_id"
TAG_RUN_URL = "kfp.pipeline_run_url"
# Set for the steps by the compiled pipeline. Names of our own: MLflow's belong to Kubeflow's MLflow plugin there.
TRACKING_URI = "RECMILL_TRACKING_URI"
LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
MAX_BATCH = 1000  # metrics MLflow accepts in one request

Point = tuple[str, float | None, int, float]  # metric, value, training step, unix seconds


@dataclass(frozen=True, kw_only=True)
class RunReference:
    """The MLflow run of a pipeline run; empty if tracking is off."""

    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""

    def to_json(self) -> dict[str, str]:
        """For records: without the login of a database's URI."""
        uri = hide_credentials(self.tracking_uri)
        return {"tracking_uri": uri, "experiment_id": self.experiment_id, "run_id": self.run_id}


def is_tracking_off() -> bool:
    return os.environ.get("RECMILL_TRACKING", "on").strip().lower() in ("off", "0", "false", "no")


def default_tracking_uri(workdir: str | Path) -> str:
    """MLFLOW_TRACKING_URI, or a SQLite file next to the run's folder, shared by all runs there."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return take_login(uri)
    if is_remote(workdir):
        raise InputError(f"{workdir}: remote folders have no default MLflow database; set MLFLOW_TRACKING_URI")
    return f"{SQLITE}{Path(workdir).absolute().parent / 'mlflow.db'}"


def find_server() -> str:
    """Where the steps of a pipeline log to; "" if they log nowhere.

    MLFLOW_TRACKING_URI comes first: the user's, or that of Kubeflow's own MLflow plugin, which also gives a step its
    run (MLFLOW_RUN_ID) and login. Else the server that the pipeline was compiled for, with the login of its secret; a
    run of the plugin's is unknown there, unless both use the same server.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return take_login(uri)
    uri = os.environ.get(TRACKING_URI, "")
    if uri:
        for name in LOGIN:
            if value := os.environ.get(name.replace("MLFLOW", "RECMILL")):
                os.environ[name] = value
        if _plugin_endpoint().rstrip("/") != uri.rstrip("/"):
            os.environ.pop("MLFLOW_RUN_ID", None)
    return uri


def take_login(uri: str) -> str:
    """The URI of a server without its login, which moves to MLflow's variables: a URI is written down, they are not."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.password is None:
        return uri
    os.environ.update(zip(LOGIN, map(unquote, (parts.username or "", parts.password)), strict=True))
    os.environ["MLFLOW_TRACKING_URI"] = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return os.environ["MLFLOW_TRACKING_URI"]


def _plugin_endpoint() -> str:
    """The server of Kubeflow's MLflow plugin, which tells the steps even where it sets no variables for them."""
    try:
        settings = json.loads(os.environ.get("KFP_MLFLOW_CONFIG", "{}"))
    except json.JSONDecodeError:
        return ""
    return str(settings.get("endpoint", "")) if isinstance(settings, dict) else ""


def load_mlflow() -> Any:
    """The mlflow module without telemetry and without log lines about the tables that it creates."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import logging

    import mlflow

    logging.getLogger("alembic").setLevel(logging.WARNING)
    return mlflow


# Whose errors mean that tracking failed. SQLAlchemy tells of a database that vanishes while MLflow creates its tables.
TRACKING_PACKAGES = frozenset({"mlflow", "requests", "sqlalchemy", "alembic", "sqlite3"})


@contextmanager
def explain_tracking_errors(tracking_uri: str) -> Iterator[None]:
    """Turn errors of MLflow, its server or its database into one sentence."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in TRACKING_PACKAGES:
            raise
        reason = hide_credentials(" ".join(str(error).split()))
        if "Max retries exceeded" in reason:
            reason = "the server does not answer"
        where = hide_credentials(tracking_uri)
        raise InputError(
            f"MLflow at {where}: {reason[:300]}; start it, set MLFLOW_TRACKING_URI, or turn tracking off "
            "(--no-tracking or RECMILL_TRACKING=off)"
        ) from error


@contextmanager
def impatient() -> Iterator[None]:
    """MLflow's HTTP client with one retry and a timeout of 5 s; its defaults wait minutes for a dead server."""
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def connect(tracking_uri: str) -> Iterator[Any]:
    """A client of the server, or of the database, whose errors become one sentence."""
    mlflow = load_mlflow()
    with explain_tracking_errors(tracking_uri):
        create_database(mlflow, tracking_uri)
        yield mlflow.MlflowClient(tracking_uri)


def open_experiment(tracking_uri: str) -> str:
    """The id of the experiment, created if needed; raises InputError if the server does not answer."""
    with connect(tracking_uri) as client, impatient():
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return str(client.get_experiment(experiment_id).experiment_id)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        if known := client.get_experiment_by_name(name):
            return str(known.experiment_id)
        return str(client.create_experiment(name, artifact_location=_artifact_location(tracking_uri)))


def _artifact_location(tracking_uri: str) -> str | None:
    # Next to the database, not in `./mlruns` of the current folder.
    if not tracking_uri.startswith(SQLITE):
        return None
    return (Path(tracking_uri.removeprefix(SQLITE)).absolute().parent / "mlartifacts").as_uri()


def open_run(
    *, tracking_uri: str, name: str, pipeline_run_id: str, url: str, params: Mapping[str, Any] | None = None
) -> RunReference:
    """Start the MLflow run of a pipeline run, or resume MLFLOW_RUN_ID."""
    experiment_id = open_experiment(tracking_uri)
    with connect(tracking_uri) as client:
        if resumed := os.environ.get("MLFLOW_RUN_ID"):
            run = client.get_run(resumed)
            client.update_run(resumed, status="RUNNING")
        else:
            run = client.create_run(experiment_id, run_name=name)
        run_id = str(run.info.run_id)
        client.set_tag(run_id, TAG_RUN_ID, pipeline_run_id)
        client.set_tag(run_id, TAG_RUN_URL, url)
        log_params(client, run_id, params or {})
    return RunReference(tracking_uri=tracking_uri, experiment_id=str(run.info.experiment_id), run_id=run_id)


def find_run(tracking_uri: str, *, pipeline_run_id: str) -> RunReference:
    """The MLflow run of a pipeline run: found by its tag, or created by the first step that needs it."""
    experiment_id = open_experiment(tracking_uri)
    with connect(tracking_uri) as client:
        found = client.search_runs([experiment_id], filter_string=f"tags.`{TAG_RUN_ID}` = '{pipeline_run_id}'")
    for run in found:
        if "mlflow.parentRunId" not in run.data.tags:
            return RunReference(tracking_uri=tracking_uri, experiment_id=experiment_id, run_id=run.info.run_id)
    url = f"/#/runs/details/{pipeline_run_id}"  # relative to the pipelines UI, like the plugin's tag
    name = os.environ.get("KFP_RUN_NAME") or pipeline_run_id
    return open_run(tracking_uri=tracking_uri, name=name, pipeline_run_id=pipeline_run_id, url=url)


def close_run(run: RunReference, *, status: str, metrics: Mapping[str, float]) -> None:
    """End a pipeline run's MLflow run with its status (FINISHED, FAILED, KILLED) and headline metrics."""
    if not run.run_id:
        return
    with connect(run.tracking_uri) as client:
        log_points(client, run.run_id, [(name, value, 0, time.time()) for name, value in metrics.items()])
        client.set_terminated(run.run_id, status=status)


def log_params(client: Any, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, str(value)[:500]) for key, value in params.items()])


def log_points(client: Any, run_id: str, points: Iterable[Point]) -> None:
    """Metrics in as few requests as MLflow allows; unknown values (None, NaN) are omitted."""
    from mlflow.entities import Metric

    metrics = [
        Metric(name, float(value), int(at * 1000), step)
        for name, value, step, at in points
        if value is not None and math.isfinite(value)
    ]
    for first in range(0, len(metrics), MAX_BATCH):
        client.log_batch(run_id, metrics=metrics[first : first + MAX_BATCH])
