"""`recmill serve` for minutes at 70% of its capacity, with new versions and garbage in between.

    python benchmarks/serving_soak.py [--minutes 30] [--load 0.7] [--reload-every 60] [--json PATH|-] [--seed K]

Two models with random weights take turns. First the capacity is measured: a closed loop of 8 callers. Then calls arrive
at random times (Poisson) at `--load` of it, a new version replaces the old one every `--reload-every` seconds, and one
caller sends garbage. It fails (exit code 1) unless every valid call is answered, every bad one is a 4xx with one
sentence, and the server's resident memory grows by at most 5% after its first reloads.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Options, finish, plain_value, say

from recmill.data.schema import Feature, Schema
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig
from recmill.serving.export import write_request_model

INFER, PREDICT = "/v2/models/recmill/infer", "/v1/models/recmill:predict"
NUM_ITEMS, NUM_CANDIDATES, NUM_SEEN = 100_000, 50, 30
CAPACITY_S = 10.0
CALLERS = 8  # of the closed loop
CONNECTIONS = 64  # of the open loop: calls in flight
MAX_GROWTH = 0.05
HEADERS = {"Content-Type": "application/json"}


def write_model(folder: Path, *, seed: int) -> None:
    """A ranker with a history, 100,000 items and random weights, as `recmill export` writes it for requests."""
    schema = Schema(
        features=(
            Feature(name="age", kind="dense", group="user"),
            Feature(name="price", kind="dense"),
            Feature(name="item", kind="sparse", table="items", num_rows=NUM_ITEMS, dim=32),
            Feature(name="seen", kind="sequence", table="items", num_rows=NUM_ITEMS, dim=32),
        ),
        item="item",
    )
    torch.manual_seed(seed)
    config = RankerConfig(max_sequence_length=64)
    model = RankingModel(schema, config, table_device=torch.device("cpu")).eval()
    tables = model.embeddings.table_weights()
    for weight in tables.values():
        weight.normal_(0.0, 0.5)
    folder.mkdir()
    write_request_model(
        folder, ranker=model.ranker, config=config, tables=tables, shared=None, checkpoint_hash=f"sha256:{seed}"
    )


def valid_body(rng: np.random.Generator) -> bytes:
    seen = rng.integers(0, NUM_ITEMS + 100, NUM_SEEN).tolist()  # some are unknown
    items = rng.integers(0, NUM_ITEMS, NUM_CANDIDATES).tolist()
    tensors = [
        {"name": "age", "datatype": "FP32", "shape": [1], "data": [float(rng.normal())]},
        {"name": "price", "datatype": "FP32", "shape": [len(items)], "data": rng.normal(size=len(items)).tolist()},
        {"name": "item", "datatype": "INT64", "shape": [len(items)], "data": items},
        {"name": "seen", "datatype": "INT64", "shape": [1, len(seen)], "data": seen},
    ]
    return json.dumps({"inputs": tensors}).encode()


def garbage(rng: random.Random, valid: bytes) -> tuple[str, bytes, dict[str, str]]:
    """A call that cannot be answered: its address, body and headers."""
    path = rng.choice((INFER, PREDICT))
    broken = json.loads(valid)
    tensor = rng.choice(broken["inputs"])
    kind = rng.randrange(9)
    if kind == 0:
        return path, rng.randbytes(rng.randrange(1, 500)), HEADERS
    if kind == 1:
        return path, valid[: rng.randrange(1, len(valid) - 1)], HEADERS
    if kind == 2:
        tensor["shape"] = rng.choice(([], [-1], [0], ["x"], [10**12], [2, 2, 2], None))
    elif kind == 3:
        tensor["datatype"] = rng.choice(("FP99", "BYTES", 3, None))
    elif kind == 4:
        tensor["data"] = rng.choice(([None], ["x", {}], [[1], [2, 3]], "text", [float("nan")], [10**40]))
    elif kind == 5:
        tensor["name"] = rng.choice(("prise", "", "seen.lengths", "a" * 1000))
    elif kind == 6:
        broken["inputs"].append(dict(tensor))
    elif kind == 7:
        return path, valid, {"Inference-Header-Content-Length": rng.choice(("-1", "x", "999999999", "3"))}
    else:
        return (
            rng.choice((f"{INFER}/x", "/v2/models/other/infer", "/v2/models/recmill/versions/1/infer")),
            valid,
            HEADERS,
        )
    return INFER, json.dumps(broken).encode(), HEADERS


@dataclass
class SoakTally:
    """What happened, counted by several threads."""

    answered: int = 0
    bad: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Caller:
    """One connection, opened again when the server closed it between two calls: such a call is sent once more."""

    def __init__(self, port: int) -> None:
        self.port, self.connection = port, self._open(port)
        self.num_answers = self.num_reopened = 0  # answers: of this connection
        self.last_s = time.monotonic()

    @staticmethod
    def _open(port: int) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        is_used = self.num_answers > 0
        try:
            return self._post(path, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            if not is_used:
                raise
            idle_s = time.monotonic() - self.last_s
            say(f"connection closed by the server after {idle_s:.3f} s without a call: {type(error).__name__}")
            self.num_reopened += 1
            return self._post(path, body, headers)

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self.connection.request("POST", path, body, headers)
            answer = self.connection.getresponse()
            found = answer.status, answer.read()
        except (http.client.HTTPException, OSError):
            self.connection.close()
            self.connection, self.num_answers = self._open(self.port), 0
            raise
        self.num_answers += 1
        self.last_s = time.monotonic()
        return found


def call_once(caller: Caller, body: bytes, tally: SoakTally) -> None:
    began = time.perf_counter()
    problem = ""
    try:
        status, content = caller.post(INFER, body, HEADERS)
        if status != 200:
            problem = f"status {status}: {content[:200]!r}"
        else:
            scores = json.loads(content)["outputs"][0]["data"]
            if len(scores) != NUM_CANDIDATES or not all(0 <= score <= 1 for score in scores):
                problem = f"scores {scores[:3]}"
    except (http.client.HTTPException, OSError, ValueError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    with tally.lock:
        tally.answered += not problem
        tally.seconds.append(time.perf_counter() - began)
        if problem:
            tally.failures.append(problem)


def send_garbage(port: int, bodies: list[bytes], tally: SoakTally, stop: threading.Event, seed: int) -> None:
    rng, caller = random.Random(seed), Caller(port)
    while not stop.wait(0.2):
        path, body, headers = garbage(rng, rng.choice(bodies))
        try:
            status, content = caller.post(path, body, headers)
            sentence = json.loads(content)["error"] if status != 200 else ""
            fine = 400 <= status < 500 and 0 < len(sentence) < 400 and "\n" not in sentence
        except (http.client.HTTPException, OSError, ValueError, KeyError) as error:
            status, sentence, fine = 0, f"{type(error).__name__}: {error}", False
        with tally.lock:
            tally.bad += 1
            tally.statuses[status] += 1
            if not fine:
                tally.failures.append(f"garbage got {status} {sentence[:200]!r} for {path} {body[:200]!r} {headers}")


def measure_capacity(port: int, bodies: list[bytes], seconds: float) -> float:
    """Calls per second of a closed loop."""
    tally, end = SoakTally(), time.monotonic() + seconds

    def loop(number: int) -> None:
        caller, at = Caller(port), number
        while time.monotonic() < end:
            call_once(caller, bodies[at % len(bodies)], tally)
            at += CALLERS

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if tally.failures:
        raise SystemExit(f"the closed loop failed: {tally.failures[0]}")
    return tally.answered / seconds


def open_loop(port: int, bodies: list[bytes], rate: float, seconds: float, tally: SoakTally, seed: int) -> int:
    """Send calls at random times; returns how many."""
    waiting: queue.Queue[bytes | None] = queue.Queue()

    def work() -> None:
        caller = Caller(port)
        while (body := waiting.get()) is not None:
            call_once(caller, body, tally)

    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    rng, sent, at = random.Random(seed), 0, time.monotonic()
    end = at + seconds
    while (at := at + rng.expovariate(rate)) < end:
        time.sleep(max(0.0, at - time.monotonic()))
        waiting.put(bodies[sent % len(bodies)])
        sent += 1
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    return sent


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def point_to(home: Path, name: str) -> None:
    (home / ".next").symlink_to(name)
    os.replace(home / ".next", home / "current")


def watch(
    home: Path, pid: int, every_s: float, samples: list[tuple[float, int]], reloads: list[float], stop: threading.Event
) -> None:
    """Sample memory every second, and change the version every so often."""
    began, names = time.monotonic(), ("one", "two")
    while not stop.wait(1.0):
        now = time.monotonic() - began
        samples.append((now, resident_bytes(pid)))
        if now >= every_s * (len(reloads) + 1):
            reloads.append(now)
            point_to(home, names[len(reloads) % 2])


def growth(samples: list[tuple[float, int]], reloads: list[float]) -> float:
    """Memory of the last tenth over that of the first tenth after two reloads, as a share more."""
    start = reloads[1] if len(reloads) > 2 else samples[len(samples) // 4][0]
    after = [size for at, size in samples if at >= start]
    part = max(1, len(after) // 10)
    return statistics.median(after[-part:]) / statistics.median(after[:part]) - 1


def metric_of(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def soak(home: Path, given: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "recmill", "serve", str(home), "--json", "--port", str(port), "--grpc-port", "0"]
    server = subprocess.Popen([*command, "--reload-seconds", "1"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while (line := server.stdout.readline()) and not line.startswith("}"):
        pass
    if not line:
        raise SystemExit(f"recmill serve ended with {server.wait(10)}")
    try:
        bodies = [valid_body(np.random.default_rng([given.seed, number])) for number in range(500)]
        capacity = measure_capacity(port, bodies, min(CAPACITY_S, given.minutes * 30))
        rate = capacity * given.load
        say(f"capacity {capacity:.0f} calls/s of {NUM_CANDIDATES} candidates; {given.minutes:g} minutes at {rate:.0f}")
        tally, stop, samples, reloads = SoakTally(), threading.Event(), [], []
        sides = [
            threading.Thread(target=send_garbage, args=(port, bodies, tally, stop, given.seed)),
            threading.Thread(target=watch, args=(home, server.pid, given.reload_every, samples, reloads, stop)),
        ]
        for thread in sides:
            thread.start()
        sent = open_loop(port, bodies, rate, given.minutes * 60, tally, given.seed)
        stop.set()
        for thread in sides:
            thread.join()
        served = metric_of(port, 'recmill_reloads_total{outcome="served"}')
        server.terminate()
        code = server.wait(60)
    finally:
        if server.poll() is None:
            server.kill()
    if code:
        tally.failures.append(f"the server ended with {code} on SIGTERM")
    return {
        "capacity": capacity,
        "sent": sent,
        "answered": tally.answered,
        "bad": tally.bad,
        "statuses": dict(tally.statuses),
        "reloads": len(reloads),
        "served_reloads": served,
        "growth": growth(samples, reloads),
        "resident_bytes": samples[-1][1],
        "p50_ms": float(np.percentile(tally.seconds, 50)) * 1000,
        "p99_ms": float(np.percentile(tally.seconds, 99)) * 1000,
        "failures": tally.failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity")
    parser.add_argument("--reload-every", type=float, default=60.0, help="seconds between new versions")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: 12 seconds, a reload every 4")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.tiny:
        given.minutes, given.reload_every = 0.2, 4.0
    with tempfile.TemporaryDirectory(prefix="recmill-soak-") as scratch:
        home = Path(scratch)
        for seed, name in enumerate(("one", "two")):
            write_model(home / name, seed=seed)
        (home / "current").symlink_to("one")
        found = soak(home, given)
    metrics = {
        "failed_calls": plain_value([found["sent"] - found["answered"]], unit="calls", note=f"of {found['sent']:,}"),
        "wrong_answers_to_garbage": plain_value(
            [sum(text.startswith("garbage") for text in found["failures"])], unit="calls", note=f"of {found['bad']:,}"
        ),
        "reloads": plain_value([found["served_reloads"]], unit="versions", note=f"of {found['reloads']} written"),
        "memory_growth": plain_value([found["growth"]], unit="share", note=f"at most {MAX_GROWTH}"),
        "resident": plain_value([found["resident_bytes"] / 1e6], unit="MB"),
        "capacity": plain_value([found["capacity"]], unit="calls/s"),
        "p50": plain_value([found["p50_ms"]], unit="ms"),
        "p99": plain_value([found["p99_ms"]], unit="ms"),
    }
    options = Options(
        benchmark="serving_soak", quick=given.minutes < 30, tiny=given.tiny, json_path=given.json, seed=given.seed
    )
    finish(options, metrics, extra={"minutes": given.minutes, "statuses": found["statuses"]})
    for text in found["failures"][:10]:
        say(text)
    if found["failures"] or found["growth"] > MAX_GROWTH or found["served_reloads"] < found["reloads"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
