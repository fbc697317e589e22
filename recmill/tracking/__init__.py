"""What a run did, written down twice: as small JSON files in its folder, and in MLflow.

    RUN/run.json             the pipeline run   -> an MLflow run
    RUN/steps/<step>.json    one step of it     -> a nested MLflow run below that

The files are always written and are what reports read. MLflow is written where a tracking URI is known, unless the
environment says RECMILL_TRACKING=off.
"""

from recmill.tracking.comparison import log_comparison
from recmill.tracking.server import RunReference, close_run, default_tracking_uri, is_tracking_off, open_run
from recmill.tracking.steps import StepRun, step_run, write_run_record

__all__ = [
    "RunReference",
    "StepRun",
    "close_run",
    "default_tracking_uri",
    "is_tracking_off",
    "log_comparison",
    "open_run",
    "step_run",
    "write_run_record",
]
