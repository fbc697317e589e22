"""What became of each step of a run: RUN/states/<step>.json, written when a step starts and when it ends.

A step whose pod is killed cannot say so; its state then stays RUNNING. States carry the id of their pipeline run,
because runs that share a folder (a rerun, a run from Kubeflow's cache) leave their states side by side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Literal

import fsspec

from recmill.artifacts import InputError, dump_record, is_remote, join_path, read_checked_json, write_text_atomically

Ended = Literal["FINISHED", "FAILED", "KILLED"]
FIRST_STEP = "open_run"  # never comes from the cache
LAST_STEPS = ("report", "compare_runs")  # a pipeline that finished one of these is complete
LEVELS = ("", "*/", "*/*/")  # steps that run in parallel have folders of their own below the run's


@dataclass(frozen=True, kw_only=True)
class StepState:
    """The state of one step in one pipeline run."""

    step: str
    state: Literal["RUNNING"] | Ended
    error: str = ""  # the sentence that the step ended with
    pipeline_run_id: str = ""
    at: float = 0.0  # Unix time


def write_state(workdir: str, step: str, state: Literal["RUNNING"] | Ended, *, error: str = "") -> None:
    """Record the state of a step. For a failed one nothing is raised, so that the step's own error is the one seen."""
    run_id = os.environ.get("KFP_RUN_ID", "")
    record = StepState(step=step, state=state, error=" ".join(error.split()), pipeline_run_id=run_id, at=time.time())
    path = join_path(workdir, f"states/{step}.json")
    with suppress(InputError, OSError) if state in ("FAILED", "KILLED") else nullcontext():
        write_text_atomically(path, dump_record(asdict(record)))


def read_states(workdir: str, *, pipeline_run_id: str) -> list[StepState]:
    """The states that steps of this pipeline run left in its folder, oldest first."""
    filesystem, root = fsspec.core.url_to_fs(workdir)
    shown = filesystem.unstrip_protocol if is_remote(workdir) else str
    found = []
    for level in LEVELS:
        for path in filesystem.glob(f"{root.rstrip('/')}/{level}states/*.json"):
            with suppress(InputError, TypeError):  # damaged, or of another version
                found.append(StepState(**read_checked_json(shown(path))))
    return sorted((state for state in found if state.pipeline_run_id == pipeline_run_id), key=lambda state: state.at)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, in MLflow's words."""

    status: Ended
    reason: str = ""  # of a failed run
    is_cached: bool = False  # no step but the first ran


def judge_run(kubeflow_state: str, states: Iterable[StepState], *, was_complete: bool) -> Outcome:
    """How a pipeline run ended, from what Kubeflow tells its exit task and what the steps recorded.

    Kubeflow Pipelines 2.17 says COMPLETE, FAILED, or RUNNING, the last both for a run that was terminated and for one
    whose steps all came from the cache. `was_complete`: a run has finished in this folder, so a cache can exist.
    """
    known = list(states)
    has_opened = all(state.state == "FINISHED" for state in known if state.step == FIRST_STEP)
    is_cached = has_opened and not any(state.step != FIRST_STEP for state in known)
    failed = [state for state in known if state.state == "FAILED"]
    if kubeflow_state in ("FAILED", "ERROR", "SYSTEM_ERROR"):
        return Outcome(status="FAILED", reason=_reason(known))
    if kubeflow_state in ("SUCCEEDED", "COMPLETE"):
        return Outcome(status="FINISHED", is_cached=is_cached)
    if kubeflow_state in ("CANCELLED", "CANCELED", "CANCELING"):
        return Outcome(status="KILLED")
    if failed:
        return Outcome(status="FAILED", reason=_reason(known))
    if any(state.step in LAST_STEPS and state.state == "FINISHED" for state in known):
        return Outcome(status="FINISHED")
    if is_cached and was_complete:
        return Outcome(status="FINISHED", is_cached=True)
    return Outcome(status="KILLED")


def _reason(known: list[StepState]) -> str:
    for state in known:
        if state.state == "FAILED":
            return f"{state.step}: {state.error}"
    for state in known:
        if state.state == "RUNNING":
            return f"{state.step}: its pod was killed or lost"
    return "a step failed before it started; the events of its pod say why"
