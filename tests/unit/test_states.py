"""What steps leave behind about how they ended, and what a run came to."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.artifacts import InputError
from recmill.tracking import step_run
from recmill.tracking.states import StepState, judge_run, read_states


@pytest.fixture(autouse=True)
def _without_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECMILL_TRACKING", "off")
    monkeypatch.setenv("KFP_RUN_ID", "run-1")


def test_a_step_leaves_its_state_and_its_sentence(tmp_path: Path) -> None:
    with step_run("generate_data", workdir=str(tmp_path)):
        assert [state.state for state in read_states(str(tmp_path), pipeline_run_id="run-1")] == ["RUNNING"]
    with pytest.raises(InputError), step_run("train_model", workdir=str(tmp_path), subfolder="all"):
        raise InputError("data/x.parquet: column\n'label' is missing")
    states = read_states(str(tmp_path), pipeline_run_id="run-1")
    assert [(state.step, state.state) for state in states] == [("generate_data", "FINISHED"), ("train_model", "FAILED")]
    assert states[1].error == "data/x.parquet: column 'label' is missing"
    assert read_states(str(tmp_path), pipeline_run_id="run-2") == []


def test_an_interrupted_step_is_killed_not_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), step_run("tune_ingest", workdir=str(tmp_path)):
        raise KeyboardInterrupt
    assert [state.state for state in read_states(str(tmp_path), pipeline_run_id="run-1")] == ["KILLED"]


def test_the_step_that_failed_first_is_the_reason() -> None:
    states = [
        StepState(step="generate_data", state="FINISHED"),
        StepState(step="profile_access", state="FAILED", error="the disk is full"),
        StepState(step="tune_ingest", state="FAILED", error="the disk is full, too"),
    ]
    assert judge_run("FAILED", states, was_complete=False).reason == "profile_access: the disk is full"


def test_a_step_that_could_not_say_why_it_ended_is_named() -> None:
    states = [StepState(step="train_model", state="RUNNING")]
    assert judge_run("FAILED", states, was_complete=False).reason == "train_model: its pod was killed or lost"
    assert "before it started" in judge_run("FAILED", [], was_complete=False).reason


def test_a_run_that_was_terminated_before_its_first_step_is_killed() -> None:
    assert judge_run("RUNNING", [], was_complete=False).status == "KILLED"


def test_a_run_that_ran_its_last_step_is_finished_whatever_kubeflow_says() -> None:
    states = [StepState(step="report", state="FINISHED")]
    assert judge_run("RUNNING", states, was_complete=True).status == "FINISHED"
    assert not judge_run("RUNNING", states, was_complete=True).is_cached
