"""`recmill submit` against a real HTTP server that speaks the few calls of Kubeflow Pipelines it needs."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

import pytest
from click.testing import CliRunner, Result

from pipelines.commands import submit
from recmill.artifacts import InputError

TOKEN = "letmein"


class PipelinesServer(ThreadingHTTPServer):
    """Kubeflow Pipelines' API as far as a submission goes: every look at the run moves it one state on."""

    def __init__(self, states: list[str], *, token: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.states, self.token = states, token
        self.experiments: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.num_looks = 0
        self.lost_looks = 0  # looks to answer with 503 first

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def look(self) -> dict[str, Any]:
        state = self.states[min(self.num_looks, len(self.states) - 1)]
        self.num_looks += 1
        task = {"task_id": "t", "display_name": "generate-data", "state": state}
        driver = {"task_id": "d", "display_name": "root-driver", "state": "SUCCEEDED"}
        error = {"error": {"code": 3, "message": "step generate-data failed"}} if state == "FAILED" else {}
        return {"run_id": "run-7", "state": state, "run_details": {"task_details": [driver, task]}, **error}


class Handler(BaseHTTPRequestHandler):
    server: PipelinesServer

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer(401, {"message": "who are you"})
        elif path == "/apis/v2beta1/healthz":
            self.answer(200, {"multi_user": False})
        elif path == "/apis/v2beta1/experiments":
            self.answer(200, {"experiments": self.server.experiments})
        elif path == "/apis/v2beta1/runs/run-7" and self.server.lost_looks:
            self.server.lost_looks -= 1
            self.answer(503, {"message": "busy"})
        elif path == "/apis/v2beta1/runs/run-7":
            self.answer(200, self.server.look())
        else:
            self.answer(404, {"message": f"no {path}"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apis/v2beta1/experiments":
            self.server.experiments.append({"experiment_id": "e-1", **body})
            self.answer(200, self.server.experiments[-1])
        elif self.path == "/apis/v2beta1/runs" and body["display_name"] == "refuse me":
            self.answer(400, {"message": "invalid pipeline"})
        elif self.path.startswith("/apis/v2beta1/runs"):
            self.server.runs.append(body)
            self.answer(200, {"run_id": "run-7", **body})
        else:
            self.answer(404, {"message": f"no {self.path}"})

    def answer(self, code: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[PipelinesServer]:
    running = PipelinesServer(["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"])
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECMILL_KFP_HOST", "KFP_HOST", "KF_PIPELINES_ENDPOINT", "RECMILL_KFP_TOKEN", "KFP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def call(*args: str) -> Result:
    return CliRunner().invoke(submit, ["--param", "workdir=/data/run", "--poll-interval", "0.01", *args])


def test_a_submission_sends_the_pipeline_with_its_parameters(server: PipelinesServer) -> None:
    flags = ("--param", "nproc=2", "--eval-fraction", "0.2", "--dedup", "off", "--memory-budget", "2GiB")
    outcome = call("--host", server.url, *flags, "--json")
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["run_id"] == "run-7"
    (sent,) = server.runs
    assert sent["runtime_config"]["parameters"] == {
        "workdir": "/data/run",
        "nproc": 2,
        "dedup": "off",
        "memory_budget": "2GiB",
        "settings": '{"eval_fraction": 0.2}',
    }
    spec = sent["pipeline_spec"].get("pipeline_spec", sent["pipeline_spec"])
    assert set(spec["components"]) >= {"comp-generate-data", "comp-train-model", "comp-report"}
    assert server.experiments[0]["display_name"] == "recmill"


def test_waiting_shows_the_steps_and_ends_well(server: PipelinesServer) -> None:
    outcome = call("--host", server.url, "--wait")
    assert outcome.exit_code == 0, outcome.output
    said = [line.split("  ", 1)[1] for line in outcome.stderr.splitlines() if "  generate_data  " in line]
    assert said == ["generate_data  started", "generate_data  done"]
    assert outcome.stdout == "run run-7 SUCCEEDED\n"


def test_a_failed_run_ends_in_exit_code_1_and_its_reason(server: PipelinesServer) -> None:
    server.states = ["RUNNING", "FAILED"]
    outcome = call("--host", server.url, "--wait", "--json")
    assert outcome.exit_code == 1
    told = json.loads(outcome.stdout)
    assert (told["state"], told["error"]) == (
        "FAILED",
        "generate_data: its pod ended without a message: killed, out of memory, or never started",
    )


def test_waiting_stops_at_the_timeout(server: PipelinesServer) -> None:
    server.states = ["RUNNING"]
    outcome = call("--host", server.url, "--wait", "--timeout", "0.05", "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["error"].startswith("still RUNNING")


def test_a_server_that_is_lost_for_a_moment_does_not_end_the_waiting(server: PipelinesServer) -> None:
    server.lost_looks = 3
    assert call("--host", server.url, "--wait").exit_code == 0


def test_the_token_travels_from_the_environment(server: PipelinesServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = TOKEN
    monkeypatch.setenv("RECMILL_KFP_HOST", server.url)
    refused = call()
    assert isinstance(refused.exception, InputError)
    assert "refuses access (401); check --token" in str(refused.exception)
    monkeypatch.setenv("RECMILL_KFP_TOKEN", TOKEN)
    assert call().exit_code == 0


def test_what_the_server_refuses_is_said_in_one_line(server: PipelinesServer) -> None:
    outcome = call("--host", server.url, "--run-name", "refuse me")
    assert isinstance(outcome.exception, InputError)
    assert "refused with 400" in str(outcome.exception)
    assert "invalid pipeline" in str(outcome.exception)
    assert "\n" not in str(outcome.exception)


def unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("http://127.0.0.1:{port}", "no Kubeflow Pipelines server answers there"),
        ("http://no-such-host.invalid", "no Kubeflow Pipelines server answers there"),
        ("localhost:8080", "expected a URL"),
        ("http://127.0.0.1:notaport", "no Kubeflow Pipelines server answers there"),
    ],
)
def test_a_wrong_host_is_named_within_seconds(host: str, says: str) -> None:
    begin = time.monotonic()
    outcome = call("--host", host.format(port=unused_port()))
    assert isinstance(outcome.exception, InputError)
    assert says in str(outcome.exception)
    assert time.monotonic() - begin < 10


def test_no_host_at_all_says_where_to_give_one() -> None:
    outcome = call()
    assert isinstance(outcome.exception, InputError)
    assert "RECMILL_KFP_HOST" in str(outcome.exception)


def test_another_web_server_is_not_taken_for_kubeflow(server: PipelinesServer) -> None:
    outcome = call("--host", f"{server.url}/elsewhere")
    assert isinstance(outcome.exception, InputError)
    assert "answers 404; is this a Kubeflow Pipelines server?" in str(outcome.exception)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("bogus=1", "expected NAME=VALUE with one of"),
        ("nproc=two", "expected a whole number"),
        ("nproc", "NAME=VALUE"),
        ("nproc=0", "nproc is 0, expected 1 or more"),
        ("tiers=true", "tiers is 'true', expected one of auto, on, off"),
        ("memory_budget=lots", "memory_budget: 'lots' is not a size"),
        ('settings={"epochs": "two"}', "settings: setting epochs='two': expected a whole number"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_is_sent(server: PipelinesServer, flag: str, says: str) -> None:
    outcome = call("--host", server.url, "--param", flag)
    assert isinstance(outcome.exception, InputError)
    assert says in str(outcome.exception)
    assert server.runs == []


def test_a_parameter_without_default_must_be_given(server: PipelinesServer) -> None:
    outcome = CliRunner().invoke(submit, ["--host", server.url, "--pipeline", "partitions"])
    assert "--param partitions=VALUE is missing" in str(outcome.exception)


def test_a_flag_that_the_pipeline_has_no_parameter_for_is_refused(server: PipelinesServer) -> None:
    outcome = call("--host", server.url, "--pipeline", "ablations", "--dedup", "on")
    assert "dedup: this pipeline has no such parameter" in str(outcome.exception)
    assert server.runs == []


def test_nothing_has_to_be_filled_in(server: PipelinesServer) -> None:
    outcome = CliRunner().invoke(submit, ["--host", server.url, "--json"])
    assert outcome.exit_code == 0, outcome.output
    (sent,) = server.runs
    assert not sent["runtime_config"].get("parameters")
    assert sent["display_name"].startswith("recmill tiny ")
