"""Ends the MLflow run of a pipeline run, whatever ended the pipeline."""

from __future__ import annotations

import os
import time
from typing import Any

from recmill.artifacts import InputError, join_path, read_checked_json
from recmill.tracking import RunReference, is_tracking_off
from recmill.tracking.server import connect, find_run, log_points
from recmill.tracking.states import LAST_STEPS, Outcome, judge_run, read_states
from recmill.tracking.steps import HEADLINE, say

TAG_REASON = "recmill.failure"
TAG_CACHED = "recmill.cached"  # every step came from Kubeflow's cache
MAX_TAG = 500


def end_run(*, state: str, workdir: str, tracking_uri: str, pipeline_run_id: str, run_name: str = "") -> RunReference:
    """Remove what a killed step left; set the MLflow run's name, final status, headline metrics and reason."""
    remove_leftovers(pipeline_run_id)
    states = read_states(workdir, pipeline_run_id=pipeline_run_id)
    outcome = judge_run(state, states, was_complete=_was_complete(workdir))
    say("close_run", " ".join(filter(None, (f"the run is {outcome.status}", outcome.reason))))
    if is_tracking_off() or not tracking_uri or not pipeline_run_id:
        return RunReference()
    found = find_run(tracking_uri, pipeline_run_id=pipeline_run_id)
    with connect(tracking_uri) as client:
        _close_steps(client, found.run_id, outcome)
        log_points(client, found.run_id, [(name, value, 0, time.time()) for name, value in headline(workdir).items()])
        if outcome.reason:
            client.set_tag(found.run_id, TAG_REASON, outcome.reason[:MAX_TAG])
        if outcome.is_cached:
            client.set_tag(found.run_id, TAG_CACHED, "true")
        if run_name:
            client.update_run(found.run_id, name=run_name)
        client.set_terminated(found.run_id, status=outcome.status)
    return found


def remove_leftovers(pipeline_run_id: str) -> None:
    """Delete TrainJobs of the run whose step was killed before it could: they would train on."""
    if not pipeline_run_id or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return
    from components.train_model.train_job import remove_train_jobs

    for name in remove_train_jobs(pipeline_run_id):
        say("close_run", f"deleted the TrainJob {name}")


def headline(workdir: str) -> dict[str, float]:
    """Quality of the model and duration of the run, as far as they are known."""
    known: dict[str, float] = {}
    for file, names in (("steps/train_model.json", (*HEADLINE, "samples_per_s")), ("run.json", ("seconds",))):
        try:
            record = read_checked_json(join_path(workdir, file))
        except InputError:
            continue  # the run ended before
        values = record.get("metrics", record)
        known |= {name: float(values[name]) for name in names if name in values}
    return known


def _was_complete(workdir: str) -> bool:
    """Whether the folder holds the record of a last step, of this run or an earlier one."""
    for step in LAST_STEPS:
        try:
            read_checked_json(join_path(workdir, f"steps/{step}.json"))
        except InputError:
            continue
        return True
    return False


def _close_steps(client: Any, run_id: str, outcome: Outcome) -> None:
    """A step whose pod was killed could not end its own run."""
    parent = client.get_run(run_id)
    for run in client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{run_id}'"):
        if run.info.status == "RUNNING":
            client.set_terminated(run.info.run_id, status="FAILED" if outcome.status == "FINISHED" else outcome.status)
