"""Progress that reaches a TrainJob's status: against a real HTTP server here, against Kubeflow's in tests/cluster."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from components.train_model.trainer_status import (
    CERTIFICATE,
    TOKEN,
    URL,
    StatusServer,
    describe_status,
    read_last_line,
)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a pod is given, and the server's key."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "token").write_text("t0ken\n")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1")
    files = ("-keyout", folder / "key.pem", "-out", folder / "ca.crt")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files], check=True, capture_output=True
    )
    return folder


@contextmanager
def listening(secrets: Path, code: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A status server that answers with `code`; its address, and what it was sent."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append({"token": self.headers["Authorization"], **json.loads(body)})
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets / "ca.crt", secrets / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}/status", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def server_at(url: str, secrets: Path) -> StatusServer:
    return StatusServer(url=url, token=secrets / "token", certificate=secrets / "ca.crt")


def test_status_has_percentage_remaining_time_and_loss() -> None:
    status = describe_status((20, 400, 100.0), (100, 400, 140.0), {"step": 100, "loss": 0.69314718})
    assert status.pop("lastUpdatedTime").endswith("Z")
    assert status == {
        "progressPercentage": 25,
        "estimatedRemainingSeconds": 150,  # 80 steps took 40 s, 300 are left
        "metrics": [
            {"name": "step", "value": "100"},
            {"name": "num_steps", "value": "400"},
            {"name": "loss", "value": "0.693147"},
        ],
    }
    assert "estimatedRemainingSeconds" not in describe_status((20, 400, 1.0), (20, 400, 1.0), {})


def test_progress_is_sent_at_intervals_and_at_the_end(tmp_path: Path, secrets: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step"')
    with listening(secrets) as (url, received):
        with server_at(url, secrets).reporting(tmp_path, interval_s=0.2) as report:
            for step in range(1, 11):
                report("train step", step, 10)
                report("evaluate valid", 1, 2)  # no progress of the training
                time.sleep(0.05)
        percentages = [entry["trainerStatus"]["progressPercentage"] for entry in received]
    assert percentages == sorted(set(percentages))
    assert percentages[-1] == 100
    assert len(percentages) <= 5
    assert received[-1]["token"] == "Bearer t0ken"
    assert {"name": "loss", "value": "0.25"} in received[-1]["trainerStatus"]["metrics"]


@pytest.mark.parametrize("kind", ["refuses", "absent", "no token"])
def test_a_server_that_fails_costs_one_line(
    tmp_path: Path, secrets: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(secrets, 503) as (url, _):
        server = server_at(url if kind == "refuses" else "https://127.0.0.1:9/status", secrets)
        if kind == "no token":
            server = replace(server, token=tmp_path / "token")
        with server.reporting(tmp_path, interval_s=0.02) as report:
            for step in range(5):
                report("train step", step + 1, 5)
                time.sleep(0.03)
    assert capsys.readouterr().err.count("status server does not answer") == 1


def test_a_pod_without_a_server_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (URL, TOKEN, CERTIFICATE):
        monkeypatch.setenv(name, "x")
    assert StatusServer.from_environment() is not None
    monkeypatch.delenv(TOKEN)
    assert StatusServer.from_environment() is None


def test_the_last_line_of_a_growing_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_last_line(path) == {}
    path.write_text('{"step": 1}')
    assert read_last_line(path) == {}
    path.write_text('{"step": 1}\n')
    assert read_last_line(path) == {"step": 1}
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)) + '{"st')
    assert read_last_line(path) == {"step": 999}
