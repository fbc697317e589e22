"""Closed and open loops of requests, in process and over HTTP, and the memory of a process that serves."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from serving_models import Unavailable

from recmill.serving import RequestBatch, Signature

Seconds = float


def closed_loop(run: Callable[[int], object], num_requests: int, *, seconds: float) -> list[Seconds]:
    """One request after another, each sent when the one before is answered: the time of each."""
    taken: list[Seconds] = []
    stop = time.perf_counter() + seconds
    while not taken or time.perf_counter() < stop:
        started = time.perf_counter()
        run(len(taken) % num_requests)
        taken.append(time.perf_counter() - started)
    return taken


def open_loop(
    run: Callable[[int], object], num_requests: int, *, rate: float, seconds: float, rng: np.random.Generator
) -> list[Seconds]:
    """Requests arrive at random (Poisson) at `rate` per second, busy or not: from arrival to answer, in turn."""
    arrivals = np.cumsum(rng.exponential(1 / rate, size=max(2, int(rate * seconds))))
    taken, started = [], time.perf_counter()
    for number, arrival in enumerate(arrivals):
        while (early := started + arrival - time.perf_counter()) > 0:
            time.sleep(max(0.0, early - 2e-4))
        run(number % num_requests)
        taken.append(time.perf_counter() - started - arrival)
    return taken


def infer_body(batch: RequestBatch, signature: Signature) -> bytes:
    """A request as the Open Inference Protocol has it."""

    def tensor(name: str, datatype: str, values: Any) -> dict[str, Any]:
        return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values.tolist()}

    inputs = [tensor("candidates", "INT64", batch.counts_R)]
    inputs += [tensor(name, "FP32", batch.dense_user_RF[:, n]) for n, name in enumerate(signature.dense_user)]
    inputs += [tensor(name, "FP32", batch.dense_candidate_NF[:, n]) for n, name in enumerate(signature.dense_candidate)]
    for lists in (batch.user_ids, batch.candidate_ids):
        for name, (values, offsets) in lists.items():
            inputs += [tensor(name, "INT64", values), tensor(f"{name}.lengths", "INT64", np.diff(offsets))]
    return json.dumps({"inputs": inputs}).encode()


@contextmanager
def served_over_http(model: Path, *, seconds: float = 120.0) -> Iterator[tuple[Callable[[bytes], bytes], int]]:
    """`recmill serve` on a free port of the loopback device: a function that sends a call, and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--grpc-port", "0", "--threads", "1", "--reload-seconds", "0"]
    command = [sys.executable, "-m", "recmill", "serve", str(model), *options, "--latency-budget-ms", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + seconds
        while not _is_ready(port):
            if process.poll() is not None:
                reason = (process.stderr.read() if process.stderr else "").strip().splitlines()
                raise Unavailable(f"recmill serve ended: {(reason or ['without a word'])[-1][:150]}")
            if time.monotonic() > deadline:
                raise Unavailable(f"recmill serve was not ready after {seconds:.0f} s")
            time.sleep(0.2)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def send(body: bytes) -> bytes:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v2/models/recmill/infer", body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content[:300]
            return content

        yield send, process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def measure_apart(model: Path, *, group: Path | None = None, **settings: Any) -> dict[str, float]:
    """`serving_memory.py` in a process of its own, which may belong to a cgroup."""
    script = Path(__file__).with_name("serving_memory.py")
    command = [sys.executable, str(script), str(model), json.dumps(settings)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def percentile_ms(taken: Sequence[Seconds], share: float) -> float:
    return 1e3 * float(np.quantile(taken, share))
