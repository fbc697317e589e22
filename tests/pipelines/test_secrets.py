"""Passwords, keys and tokens stay out of everything that recmill writes, prints and sends: planted ones are sought."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from components.placement import ClusterPlacement
from pipelines.commands import compile_pipeline, submit
from recmill.artifacts import InputError, hide_credentials
from recmill.cli import main
from recmill.data.preparation.reading import parse_spec
from recmill.tracking import default_tracking_uri, find_server
from recmill.tracking.server import RunReference, connect
from tests.pipelines.test_submit import PipelinesServer, server

__all__ = ["server"]  # a fixture

PLANTED = {
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-5c1f",
    "MLFLOW_TRACKING_TOKEN": "planted-bearer-77aa",
    "AWS_ACCESS_KEY_ID": "PLANTEDKEYID00D1",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-9e02",
    "AWS_SESSION_TOKEN": "planted-session-31b7",
    "RECMILL_KFP_TOKEN": "planted-kfp-a4d0",
    "RECMILL_TRACKING_PASSWORD": "planted-login-62ce",
}
IN_URL = "planted-url-b83e"
SECRETS = [*PLANTED.values(), IN_URL]


def found_in(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in SECRETS if secret.encode() in data]


def found_under(folder: Path) -> dict[str, list[str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(path): found for path in files if (found := found_in(path.read_bytes()))}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.usefixtures("planted")
def test_a_compiled_pipeline_holds_no_secret(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path), "--data", "s3://logs/day", "--nproc", "2"])
    assert outcome.exit_code == 0, outcome.output
    assert not found_in(outcome.output)
    assert not found_under(tmp_path)


@pytest.mark.usefixtures("planted")
def test_a_submission_sends_and_prints_no_secret(server: PipelinesServer) -> None:
    server.token = PLANTED["RECMILL_KFP_TOKEN"]
    arguments = ["--host", server.url, "--wait", "--poll-interval", "0.01", "--data", "s3://logs/day"]
    outcome = CliRunner().invoke(submit, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert not found_in(outcome.output)
    assert server.runs
    assert not found_in(json.dumps([server.runs, server.experiments]))
    server.token = "another"
    refused = CliRunner().invoke(submit, arguments)
    assert isinstance(refused.exception, InputError)
    assert not found_in(str(refused.exception) + refused.output)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--data", f"ftp://me:{IN_URL}@host/log"],
        ["train", f"s3://{PLANTED['AWS_ACCESS_KEY_ID']}:{IN_URL}@bucket/data", "--out", "x"],
        ["cluster", f"https://host/log?X-Amz-Signature={IN_URL}&X-Amz-Expires=9", "--out", "x"],
        ["submit", "--host", f"http://me:{IN_URL}@host"],
        ["submit", "--host", "http://host", f"--param=data=s3://k:{IN_URL}@bucket"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_urls_with_a_password_are_refused_without_repeating_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err.count("\n")) == (2, 1)
    assert "a URL must not hold a password or key" in shown.err
    assert not found_in(shown.out + shown.err)


def test_files_with_a_password_in_a_url_are_refused_without_repeating_it() -> None:
    url = f"s3://key:{IN_URL}@bucket/events"
    for read in (
        lambda: ClusterPlacement.from_body({"tracking_uri": f"http://me:{IN_URL}@mlflow:5000"}, where="placement.yaml"),
        lambda: parse_spec(f"format_version: 1\nsources:\n  events: {{path: '{url}'}}\n", where="log.yaml"),
    ):
        with pytest.raises(InputError, match="must not hold a password") as refused:
            read()
        assert not found_in(str(refused.value))


def test_the_login_of_a_tracking_server_moves_to_mlflows_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    for find in (find_server, lambda: default_tracking_uri(tmp_path)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{IN_URL}%21@127.0.0.1:9/path")
        assert find() == "http://127.0.0.1:9/path" == os.environ["MLFLOW_TRACKING_URI"]
        assert os.environ["MLFLOW_TRACKING_USERNAME"] == "me"
        assert os.environ["MLFLOW_TRACKING_PASSWORD"] == f"{IN_URL}!"
    database = f"postgresql://me:{IN_URL}@host/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    assert find_server() == database  # MLflow needs it whole; what is written down is
    assert RunReference(tracking_uri=database).to_json()["tracking_uri"] == "postgresql://***@host/mlflow"


def test_errors_hide_the_login_of_a_database() -> None:
    from mlflow.exceptions import MlflowException

    database = f"postgresql://me:{IN_URL}@host/mlflow"
    with pytest.raises(InputError) as refused, connect("sqlite://"):
        raise MlflowException(f"cannot connect to {database}")
    assert not found_in(str(refused.value))
    assert hide_credentials("s3://bucket/a:b@c and host:80/x@y") == "s3://bucket/a:b@c and host:80/x@y"


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A real MLflow server. It ignores the login, but every client sends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    database = tmp_path / "server" / "mlflow.db"
    database.parent.mkdir()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--artifacts-destination",
        str(database.parent / "files"),
    ]
    with open(tmp_path / "server" / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files with a short path: the name of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="recmill-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_run_writes_no_secret_anywhere(mlflow_server: str, scratch: Path, tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "RECMILL_"))}
    environment = inherited | PLANTED | {"no_proxy": "127.0.0.1", "TMPDIR": str(scratch)}
    del environment["MLFLOW_TRACKING_TOKEN"], environment["MLFLOW_TRACKING_PASSWORD"]  # the URI's login is used
    environment["MLFLOW_TRACKING_URI"] = f"http://me:{IN_URL}@{mlflow_server}"
    small = ["--preset", "tiny", "--set", "data.sessions=100", "--set", "batch_size=256", "--no-baseline"]
    program = Path(sys.executable).with_name("recmill")
    ran = subprocess.run(
        [program, "run", *small, "--set", "threads=1", "--out", tmp_path / "runs" / "one"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
        timeout=800,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"MLflow: http://{mlflow_server}" in ran.stdout
    assert not found_in(ran.stdout + ran.stderr)
    assert not found_under(tmp_path)  # the run's folder with its report, MLflow's database and files
    assert not any(found_in(path.read_bytes()) for path in scratch.rglob("*") if path.is_file())
    logged = sqlite3.connect(tmp_path / "server" / "mlflow.db").execute("select count(*) from params").fetchone()
    assert logged[0] > 10
