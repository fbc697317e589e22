"""`recmill serve` as its own process, asked over REST and gRPC. Needs the server's environment: make setup-server."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.serving.server.environment import CHECKOUT, FOLDER
from recmill.serving.server.versions import load_version
from tests.unit.serving.server.served_models import write_served_model

PYTHON = CHECKOUT / FOLDER / "bin/python"
CLIENT = Path(__file__).with_name("kserve_calls.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="the server's environment is missing: make setup-server"),
]
INFER, PREDICT = "/v2/models/recmill/infer", "/v1/models/recmill:predict"
INSTANCES = {
    "instances": [
        {
            "user": {"age": 30, "seen": ["sku-3", "sku-4"]},
            "candidates": [{"price": 1, "item": "sku-1"}, {"price": 2, "item": "sku-2"}],
        },
        {"user": {"age": 40}, "candidates": [{"price": 3, "item": "sku-99"}]},
    ]
}


class RunningServer:
    def __init__(self, process: subprocess.Popen[str], said: dict[str, Any]) -> None:
        self.process, self.said = process, said
        self.port = int(said["rest"].rpartition(":")[2])

    def ask(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str = ""
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if headers is None else headers
        connection.request(method or ("GET" if data is None else "POST"), path, data, given)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(text) if "json" in kind else text.decode(), dict(answer.headers)

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: Path, *options: str) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "recmill", "serve", str(model), "--json", "--port", str(free_port())]
    command += ["--grpc-port", str(free_port()), "--reload-seconds", "0.2", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait(10)}"
            text += line
        yield RunningServer(process, json.loads(text))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        write_served_model(home / name, seed=seed, vocabulary=True)
    (home / "current").symlink_to("one")
    return home


def expected(folder: Path) -> np.ndarray:
    from recmill.serving.server.instances import instance_tensors

    version = load_version(folder, max_candidates=100)
    return version.model.score(version.reader.read(instance_tensors(INSTANCES, version.signature))[0])


def point(home: Path, name: str) -> None:
    (home / ".next").symlink_to(name)
    os.replace(home / ".next", home / "current")


def test_kserves_own_clients_get_the_models_scores(models: Path) -> None:
    scores = expected(models / "one")
    with serving(models / "one", "--reload-seconds", "0") as server:
        said = subprocess.run(
            [PYTHON, CLIENT, server.said["rest"], server.said["grpc"]], capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stderr
        found = json.loads(said.stdout)
        assert found["live"]
        assert found["ready"]
        assert found["model_ready"]
        assert found["grpc_live"]
        assert found["grpc_model_ready"]
        for way in ("rest", "rest_binary", "grpc", "grpc_contents"):
            if way.startswith("grpc"):  # KServe's client for REST drops the version
                assert found[way]["version"] == server.said["version"]
            assert found[way]["scores"] == pytest.approx(scores.tolist(), abs=1e-6), way
        status, sentence = found["grpc_refusal"]
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert "'prise'" in sentence
        status, answer, _ = server.ask(PREDICT, INSTANCES)
        assert status == 200
        assert np.concatenate(answer["predictions"]) == pytest.approx(scores, abs=1e-6)
        assert server.metric('recmill_unknown_ids_total{feature="item"}') == 5
        assert server.metric("recmill_candidates_total") == 15
        assert server.stop() == 0


WRONG: list[tuple[str, Any, dict[str, str] | None, int, str]] = [
    (INFER, b"{bad", None, 400, "body"),
    (INFER, b"\xff\xfe", None, 400, "body"),
    (INFER, b"", None, 400, "body"),
    (INFER, b"[" * 100_000, None, 400, "body"),
    (INFER, {"inputs": 3}, None, 400, "inputs"),
    (INFER, {"inputs": [{"name": "age", "shape": [1], "datatype": "FP32"}]}, None, 400, "inputs.0.data"),
    (INFER, {"inputs": [{"name": "age", "shape": "x", "datatype": "FP32", "data": []}]}, None, 400, "inputs.0.shape"),
    (INFER, {"inputs": [{"name": "prise", "shape": [1], "datatype": "FP32", "data": [1]}]}, None, 400, "'prise'"),
    (INFER, {"inputs": [{"name": "age", "shape": [1], "datatype": "FP16", "data": [1]}]}, None, 400, "age"),
    (INFER, {"inputs": []}, {}, 400, "candidates"),
    (INFER, b'{"inputs":[{}]}', {"Inference-Header-Content-Length": "15"}, 400, "inputs.0.name"),
    (INFER, b'{"inputs":[{}]}', {"Inference-Header-Content-Length": "99"}, 400, "inference-header-content-length"),
    (INFER, {}, {"ce-id": "1", "ce-type": "x", "ce-source": "x", "ce-specversion": "1.0"}, 400, "inputs"),
    (INFER, b"\0" * 200_001, None, 413, "body"),
    ("/v2/models/other/infer", {"inputs": []}, None, 404, "model"),
    ("/v2/models/recmill/versions/7/infer", {"inputs": []}, None, 404, "version"),
    ("/v2/repository/models/recmill/unload", b"", None, 404, "unload"),
    (PREDICT, b"nonsense", {}, 400, "body"),
    (PREDICT, {"instances": [{"user": {"age": "x"}, "candidates": []}]}, None, 400, "instances[0].user.age"),
    (PREDICT, {"instances": [{"user": {"age": 1}, "candidates": [{"price": 1}] * 101}]}, None, 413, "candidates"),
    ("/v1/models/recmill:explain", INSTANCES, None, 404, "address"),
    ("/nowhere", {}, None, 404, "address"),
    ("/metrics", {}, None, 405, "method"),
]


def test_every_bad_request_is_a_4xx_with_one_sentence_that_names_the_field(models: Path) -> None:
    with serving(models / "one", "--max-request-bytes", "200000", "--max-candidates", "100") as server:
        for path, body, headers, status, field in WRONG:
            found, answer, _ = server.ask(path, body, headers=headers)
            assert (found, list(answer)) == (status, ["error"]), (path, body, answer)
            assert field in answer["error"], answer
            assert "\n" not in answer["error"]
            assert len(answer["error"]) < 300
        rng = random.Random(0)
        good = json.dumps(INSTANCES).encode()
        for _ in range(200):  # valid bodies with a few bytes changed
            body = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            status, answer, _ = server.ask(rng.choice((INFER, PREDICT)), bytes(body))
            assert status == 200 or (status == 400 and "\n" not in answer["error"]), (status, answer, bytes(body))
        assert server.ask(PREDICT, INSTANCES)[0] == 200
        assert server.metric('recmill_calls_total{protocol="rest",status="5') == 0


def test_a_connection_outlives_the_calls_that_are_refused(models: Path) -> None:
    """Also where the answer comes before the body was sent: a caller that still sends sees no closed connection."""
    kind, large = {"Content-Type": "application/json"}, b" " * 20_000_000
    with serving(models / "one", "--max-request-bytes", "200000", "--max-candidates", "100") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.connect()
        first = connection.sock
        calls: list[tuple[str, Any, Any, int]] = [
            (
                path,
                body if isinstance(body, bytes) else json.dumps(body).encode(),
                kind if given is None else given,
                code,
            )
            for path, body, given, code, _ in WRONG
        ]
        pieces = [large[:65_536]] * 300
        calls += [(INFER, large, kind, 413), (INFER, iter(pieces), kind, 413), (PREDICT, iter(pieces), kind, 413)]
        calls += [(PREDICT, json.dumps(INSTANCES).encode(), kind, 200)]
        for path, body, headers, status in calls:
            connection.request("POST", path, body, headers, encode_chunked=not isinstance(body, bytes))
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == status, (path, content)
            assert connection.sock is first, path


def test_a_reload_under_load_fails_no_call_and_changes_the_scores(models: Path) -> None:
    first, second = expected(models / "one"), expected(models / "two")
    point(models, "one")
    with serving(models) as server:
        stop, found = threading.Event(), []

        def ask_again() -> None:
            while not stop.is_set():
                status, answer, _ = server.ask(PREDICT, INSTANCES)
                found.append((status, np.concatenate(answer["predictions"]) if status == 200 else answer))

        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(ask_again) for _ in range(4)]
            for name in ("two", "one", "two"):
                before = server.metric('recmill_reloads_total{outcome="served"}')
                point(models, name)
                deadline_s = time.monotonic() + 30
                while server.metric('recmill_reloads_total{outcome="served"}') == before:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)
                time.sleep(0.3)
            stop.set()
            for task in tasks:
                task.result()
        assert {status for status, _ in found} == {200}
        is_first = [np.allclose(scores, first, atol=1e-6) for _, scores in found]
        is_second = [np.allclose(scores, second, atol=1e-6) for _, scores in found]
        assert any(is_first)
        assert any(is_second)
        assert all(a != b for a, b in zip(is_first, is_second, strict=True))
        assert server.metric("recmill_model_info") == 1
        assert server.ask("/v2/models/recmill")[1]["versions"] == [load_version(models / "two", max_candidates=1).name]


def test_a_full_server_answers_429_and_says_when_to_come_back(models: Path) -> None:
    body = {"instances": [{"user": {"age": 1}, "candidates": [{"price": 1, "item": "sku-1"}] * 2000}] * 4}
    with (
        serving(models / "one", "--max-queue", "1", "--latency-budget-ms", "0") as server,
        ThreadPoolExecutor(16) as pool,
    ):
        found = list(pool.map(lambda _: server.ask(PREDICT, body), range(48)))
        statuses = [status for status, _, _ in found]
        assert set(statuses) == {200, 429}
        for status, answer, headers in found:
            if status == 429:
                assert int(headers["retry-after"]) >= 1
                assert "busy" in answer["error"]


def test_sigterm_answers_calls_in_flight_and_is_not_ready_meanwhile(models: Path) -> None:
    with serving(models / "one", "--drain-seconds", "10") as server:
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8
        while (status := server.ask("/v2/health/ready")[0]) == 200 and time.monotonic() < deadline:
            time.sleep(0.1)  # until the signal is noticed
        assert status == 503
        assert server.ask("/v2/health/live")[0] == 200
        assert server.ask(PREDICT, INSTANCES)[0] == 200
        assert server.process.wait(30) == 0


def test_several_workers_share_a_port_and_their_metrics(models: Path) -> None:
    point(models, "one")
    with serving(models, "--workers", "2", "--threads", "1") as server:
        deadline_s = time.monotonic() + 60
        pids = set()
        while len(pids) < 2:
            assert time.monotonic() < deadline_s
            assert server.ask(PREDICT, INSTANCES)[0] == 200
            pids = workers_of(server.process.pid)
        for _ in range(20):
            assert server.ask(PREDICT, INSTANCES)[0] == 200
        assert server.metric('recmill_calls_total{protocol="rest",status="200"}') >= 21
        os.kill(min(pids), signal.SIGKILL)
        while workers_of(server.process.pid) & {min(pids)} or len(workers_of(server.process.pid)) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        shared = metrics_folder(max(pids))
        assert shared.exists()
        point(models, "two")
        second = load_version(models / "two", max_candidates=1).name
        while [server.metric(f"recmill_model_info{of}") for of in ("", f'{{version="{second}"}}')] != [1, 1]:
            assert time.monotonic() < deadline_s  # the lost worker's version would stay
            time.sleep(0.1)
        assert server.stop() == 0
        assert not workers_of(server.process.pid)
        assert not shared.exists()


def metrics_folder(worker: int) -> Path:
    entries = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    return next(Path(os.fsdecode(entry.partition(b"=")[2])) for entry in entries if entry.startswith(b"PROMETHEUS_"))


def workers_of(parent: int) -> set[int]:
    said = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return {int(line) for line in said.split()}


def test_a_server_waits_for_its_first_version(models: Path, tmp_path: Path) -> None:
    threading.Timer(6, lambda: (tmp_path / "current").write_text(str(models / "one"), encoding="utf-8")).start()
    with serving(tmp_path, "--wait-seconds", "60") as server:
        assert server.ask(PREDICT, INSTANCES)[0] == 200


def test_a_server_that_cannot_start_says_why(models: Path, tmp_path: Path) -> None:
    for options, sentence in (
        ((str(tmp_path),), "recmill export"),
        ((str(models / "one"), "--port", "1", "--host", "203.0.113.7"), "cannot listen there"),
    ):
        said = subprocess.run(
            [sys.executable, "-m", "recmill", "serve", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert said.returncode == 2
        assert sentence in said.stderr


FIELDS_OF_KSERVE = """
import sys, yaml
sys.argv = sys.argv[:1]
from kserve import V1beta1InferenceService, V1beta1InferenceServiceSpec, V1beta1PredictorSpec
from kubernetes.client import V1Container
body = yaml.safe_load(sys.stdin)
predictor = body["spec"]["predictor"]
(container,) = predictor["containers"]
kinds = (V1beta1InferenceService, V1beta1InferenceServiceSpec, V1beta1PredictorSpec, V1Container)
for kind, given in zip(kinds, (body, body["spec"], predictor, container)):
    print(*(set(given) - set(kind.attribute_map.values())), end="")
"""


def test_the_inference_service_has_only_fields_that_kserve_knows() -> None:
    manifest = CHECKOUT / "manifests/components/serving/inference-service.yaml"
    said = subprocess.run(
        [PYTHON, "-c", FIELDS_OF_KSERVE],
        input=manifest.read_text("utf-8"),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert said.stdout == ""
