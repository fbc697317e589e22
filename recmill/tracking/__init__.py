"""Records of a run: small JSON files in its folder, and MLflow.

    RUN/run.json             the pipeline run   -> an MLflow run
    RUN/steps/<step>.json    one step of it     -> a nested MLflow run below that

The files are always written; reports read them. MLflow is used if a tracking URI is known, unless the environment sets
RECMILL_TRACKING=off.
"""

from recmill.tracking.comparison import log_comparison
from recmill.tracking.replay import Replayer
from recmill.tracking.server import (
    RunReference,
    close_run,
    default_tracking_uri,
    find_server,
    is_tracking_off,
    open_run,
)
from recmill.tracking.steps import StepRun, name_mlflow_run, step_run, write_run_record

__all__ = [
    "Replayer",
    "RunReference",
    "StepRun",
    "close_run",
    "default_tracking_uri",
    "find_server",
    "is_tracking_off",
    "log_comparison",
    "name_mlflow_run",
    "open_run",
    "step_run",
    "write_run_record",
]
