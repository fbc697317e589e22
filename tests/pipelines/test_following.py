"""What people see of a run on Kubeflow, from answers as the server of 2.17 gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from pipelines.commands import submit
from pipelines.server import following
from pipelines.server.commands import runs, stop, wait
from recmill.artifacts import InputError
from tests.pipelines.kubeflow_answers import RUN, WORKFLOW, KubeflowServer, look, serving, step

GENERATED = "[generate_data] started\nnoise\n[generate_data] done in 30.2 s: 5,400 rows/s, 1.2 MiB\n"
PROFILED = "[profile_access] started\n[profile_access] done in 3.0 s: 90,000 rows/s\n"
MISSING = "[generate_data] started\nTraceback ...\n[generate_data] error: /runs/nowhere: no such file or folder\n"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("KUBECONFIG", "/nonexistent/kubeconfig")


@pytest.fixture
def server() -> Iterator[KubeflowServer]:
    with serving(KubeflowServer([])) as running:
        yield running


def follow(server: KubeflowServer, *flags: str) -> Result:
    return CliRunner().invoke(wait, [RUN, "--host", server.url, "--poll-interval", "0.01", *flags])


def lines(outcome: Result) -> list[str]:
    """What was said, without the times of day."""
    return [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in outcome.stderr.splitlines()]


def test_a_run_is_one_line_per_step_when_it_starts_and_when_it_ends(server: KubeflowServer) -> None:
    server.logs = {f"{WORKFLOW}-1": GENERATED, f"{WORKFLOW}-2": PROFILED}
    generated = step("generate-data", "SUCCEEDED", 30, 67, pod="1")
    server.looks = [
        look("PENDING"),
        look("RUNNING", step("generate-data", "RUNNING", 30, pod="1")),
        look("RUNNING", generated),
        look("RUNNING", generated, step("profile-access", "RUNNING", 80, pod="2")),
        look("SUCCEEDED", generated, step("profile-access", "SUCCEEDED", 80, 90, pod="2")),
    ]
    outcome = follow(server)
    assert outcome.exit_code == 0
    assert lines(outcome) == [
        "generate_data  started",
        "generate_data  done in 37 s: 5,400 rows/s, 1.2 MiB",
        "profile_access  started",
        "profile_access  done in 10 s: 90,000 rows/s",
    ]
    assert outcome.stdout == f"run {RUN} SUCCEEDED\n"


def test_a_step_from_the_cache_is_called_cached(server: KubeflowServer) -> None:
    server.logs = {f"{WORKFLOW}-2": PROFILED}
    server.looks = [
        look(
            "SUCCEEDED",
            step("generate-data", "SUCCEEDED", 30, 32, work="SKIPPED"),
            step("profile-access", "SUCCEEDED", 40, 50, pod="2"),
        )
    ]
    assert lines(follow(server)) == [
        "generate_data  cached",
        "profile_access  started",
        "profile_access  done in 10 s: 90,000 rows/s",
    ]


def test_a_failed_run_ends_with_the_sentence_of_its_step(server: KubeflowServer) -> None:
    server.logs = {f"{WORKFLOW}-1": MISSING}
    server.looks = [
        look("RUNNING", step("generate-data", "RUNNING", 30, pod="1")),
        look("FAILED", step("generate-data", "FAILED", 30, 42, pod="1"), step("close-run", "SUCCEEDED", 50, 55)),
    ]
    outcome = follow(server)
    assert outcome.exit_code == 1
    sentence = "/runs/nowhere: no such file or folder"
    where = f"{server.url}/apis/v1alpha1/runs/{RUN}/nodes/{WORKFLOW}-1/log"
    assert f"generate_data  failed after 12 s: {sentence} (log: {where})" in lines(outcome)
    assert outcome.stdout == f"run {RUN} FAILED: generate_data: {sentence} (log: {where})\n"


def test_a_pod_that_died_without_a_word_is_explained_by_the_cluster(
    server: KubeflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = "pod recmill-8txz6-train was killed at its memory limit of 2Gi (OOMKilled); give train_model more memory"
    monkeypatch.setattr(following, "why_pod_died", lambda run_id, namespace, step: died)
    server.looks = [look("FAILED", step("train-model", "FAILED", 30, 90, pod="9"))]
    outcome = follow(server)
    assert lines(outcome)[-1] == f"train_model  failed after 60 s: {died}"


def test_without_access_to_the_cluster_a_silent_death_is_still_one_sentence(server: KubeflowServer) -> None:
    server.looks = [look("FAILED", step("train-model", "FAILED", 30, 90, pod="9"))]
    assert "its pod ended without a message: killed, out of memory, or never started" in follow(server).stdout


def test_a_run_that_waits_says_why(server: KubeflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "WAITING_S", 0.05)
    pending = look("RUNNING", step("generate-data", "RUNNING", 30, work="PENDING", pod="1"))
    server.looks = [pending] * 30 + [look("SUCCEEDED")]
    said = [line for line in lines(follow(server)) if line.startswith("waiting")]
    assert len(said) == 1  # the same reason is given once
    assert said[0].startswith(
        "waiting for a node; `kubectl --namespace kubeflow get events --field-selector type=Warning` shows why"
    )


def test_a_server_that_restarts_is_waited_for(server: KubeflowServer) -> None:
    server.looks = [look("SUCCEEDED")]
    server.num_lost = 3
    outcome = follow(server)
    assert outcome.exit_code == 0
    assert [line.split(" (")[0] for line in lines(outcome)] == [
        "waiting: the server does not answer",
        "the server answers again",
    ]


def test_machines_get_the_same_as_events(server: KubeflowServer) -> None:
    server.logs = {f"{WORKFLOW}-1": GENERATED}
    server.looks = [look("SUCCEEDED", step("generate-data", "SUCCEEDED", 30, 67, pod="1"))]
    outcome = follow(server, "--json")
    told = json.loads(outcome.stdout)
    assert [(event["event"], event["step"]) for event in told["events"]] == [
        ("started", "generate_data"),
        ("done", "generate_data"),
    ]
    assert told["events"][1]["seconds"] == 37
    assert told["tasks"] == {"generate_data": "SUCCEEDED"}
    assert [json.loads(line) for line in outcome.stderr.splitlines()] == told["events"]


def test_steps_of_a_loop_are_told_apart(server: KubeflowServer) -> None:
    server.logs = {
        f"{WORKFLOW}-{pod}": f"[train_model] started\n[train_model] done in 9 s: AUC {auc}\n"
        for pod, auc in (("1", "0.71"), ("2", "0.72"))
    }
    first, second = (
        step("train-model", "SUCCEEDED", began, began + 10, pod=pod) for began, pod in ((30, "1"), (60, "2"))
    )
    server.looks = [look("SUCCEEDED", first, second)]
    done = [line for line in lines(follow(server)) if "done" in line]
    assert done == ["train_model  done in 10 s: AUC 0.71", "train_model_2  done in 10 s: AUC 0.72"]


def test_ctrl_c_leaves_the_run_and_says_how_to_come_back(
    server: KubeflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.server.commands.follow_run", interrupt)
    outcome = follow(server)
    assert outcome.exit_code == 130
    for said in (f"recmill wait {RUN}", f"recmill stop {RUN}", "recmill runs"):
        assert said in outcome.stderr
    assert server.terminated == []


def test_stopping_a_run_terminates_it_once(server: KubeflowServer) -> None:
    server.looks = [look("RUNNING")]
    assert CliRunner().invoke(stop, [RUN, "--host", server.url]).stdout == f"run {RUN} is stopping\n"
    server.looks = [look("SUCCEEDED")]
    assert "has already ended (SUCCEEDED)" in CliRunner().invoke(stop, [RUN, "--host", server.url]).stdout
    assert server.terminated == [RUN]


def test_an_unknown_run_is_named(server: KubeflowServer) -> None:
    outcome = CliRunner().invoke(wait, ["run-8", "--host", server.url])
    assert isinstance(outcome.exception, InputError)
    assert str(outcome.exception) == f"{server.url}: has no run run-8"


def test_runs_lists_runs_and_schedules(server: KubeflowServer) -> None:
    server.schedules = [
        {
            "recurring_run_id": "r-9",
            "display_name": "nightly",
            "status": "ENABLED",
            "trigger": {"cron_schedule": {"cron": "0 0 3 * * *"}},
        }
    ]
    outcome = CliRunner().invoke(runs, ["--host", server.url])
    assert outcome.exit_code == 0, outcome.exception
    assert re.search(rf"SUCCEEDED +2026-11-18 03:00 +{RUN}  recmill tiny", outcome.stdout)
    assert re.search(r"ENABLED +0 0 3 \* \* \* +r-9  nightly", outcome.stdout)


def test_a_named_pipeline_gets_a_version_only_when_its_yaml_changed(server: KubeflowServer) -> None:
    call = ["--host", server.url, "--pipeline-name", "nightly", "--param", "workdir=/runs/x", "--json"]
    for _ in range(2):
        outcome = CliRunner().invoke(submit, call)
        assert outcome.exit_code == 0, outcome.exception
    assert len(server.pipelines) == len(server.versions) == 1
    assert server.runs[0]["pipeline_version_reference"] == {"pipeline_id": "p-1", "pipeline_version_id": "v-0"}
    assert CliRunner().invoke(submit, [*call, "--image-tag", "other"]).exit_code == 0
    assert len(server.versions) == 2


def test_a_schedule_does_not_catch_up_and_replaces_its_former_self(server: KubeflowServer) -> None:
    call = ["--host", server.url, "--pipeline-name", "nightly", "--param", "workdir=/runs/x"]
    for _ in range(2):
        outcome = CliRunner().invoke(submit, [*call, "--cron", "0 3 * * *"])
        assert outcome.exit_code == 0, outcome.exception
    (schedule,) = server.schedules
    assert schedule["no_catchup"] is True
    assert schedule["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * *"
    assert schedule["max_concurrency"] == 1
    assert server.runs == []


@pytest.mark.parametrize(
    ("cron", "says"), [("every night", "expected five fields"), ("0 3 * *", "expected five fields")]
)
def test_a_wrong_schedule_is_refused_before_anything_is_sent(server: KubeflowServer, cron: str, says: str) -> None:
    outcome = CliRunner().invoke(
        submit, ["--host", server.url, "--pipeline-name", "n", "--param", "workdir=/runs/x", "--cron", cron]
    )
    assert isinstance(outcome.exception, InputError)
    assert says in str(outcome.exception)
    assert server.pipelines == []
