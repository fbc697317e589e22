"""A caller of `recmill serve`: python -m tests.faults.serve_case MODELS [--json]

It starts a server with two workers on free ports, asks for scores before and after a new version appears, sends
garbage between the calls, stops the server and prints the scores. A call whose connection breaks is sent again. If the
server ends early, the caller ends as the server did, once nobody listens on the ports.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = 40  # before the new version, and as many after it
PAUSE_S = 0.05  # between calls
ANSWER_S = 300.0  # within which every call must have its answer, however often it is sent
END_S = 60.0
PREDICT = "/v1/models/recmill:predict"
GARBAGE = (b"{bad", b"", b'{"instances": 3}', b'{"instances": [{"user": {"age": "x"}, "candidates": []}]}')
WRONG = 3  # exit code: the server did what it must not do


class ServerEnded(Exception):
    """The server ended before it was told to."""


def write_models(folder: Path) -> None:
    """Two versions of a small model, `one` and `two`."""
    from tests.unit.serving.server.served_models import write_served_model

    folder.mkdir(parents=True)
    for seed, name in enumerate(("one", "two")):
        write_served_model(folder / name, seed=seed, vocabulary=True)


def call_body(number: int) -> bytes:
    candidates = [{"price": number + place, "item": f"sku-{place}"} for place in range(1 + number % 5)]
    user = {"age": 20 + number, "seen": [f"sku-{number % 6}"]}
    return json.dumps({"instances": [{"user": user, "candidates": candidates}]}).encode()


class Caller:
    def __init__(self, server: subprocess.Popen[bytes], port: int) -> None:
        self.server, self.port = server, port

    def ask(self, body: bytes) -> tuple[int, Any]:
        """The status and the answer; sent again where there is none."""
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._send(body)
            if self.server.poll() is not None:
                raise ServerEnded
            time.sleep(0.1)
        raise AssertionError(f"no answer within {ANSWER_S:g} seconds")

    def _send(self, body: bytes) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("POST", PREDICT, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def scores(self, number: int) -> list[float]:
        status, answer = self.ask(call_body(number))
        assert status == 200, (status, answer)
        return [round(score, 6) for score in answer["predictions"][0]]

    def new_scores(self, number: int, old: list[float]) -> list[float]:
        """Scores of the version that comes after the one that gave `old`."""
        deadline_s = time.monotonic() + ANSWER_S
        while (found := self.scores(number)) == old:
            assert time.monotonic() < deadline_s, f"the old version serves after {ANSWER_S:g} seconds"
            time.sleep(PAUSE_S)
        return found

    def send_garbage(self, number: int) -> None:
        status, answer = self.ask(GARBAGE[number % len(GARBAGE)])
        assert status == 400, (status, answer)
        assert "\n" not in answer["error"], answer


def call_all(caller: Caller, watched: Path) -> list[list[list[float]]]:
    old, new = [], []
    for number in range(CALLS):
        old.append(caller.scores(number))
        caller.send_garbage(number)
        time.sleep(PAUSE_S)
    point(watched, "two")
    for number in range(CALLS):
        new.append(caller.new_scores(number, old[number]))
        caller.send_garbage(number)
        time.sleep(PAUSE_S)
    return [old, new]


def point(watched: Path, name: str) -> None:
    (watched / ".next").symlink_to(watched.parent / name)
    os.replace(watched / ".next", watched / "current")


@contextmanager
def watched_folder(models: Path) -> Iterator[Path]:
    """The folder with the link `current`: where the models are, because the disk of the case may be read-only."""
    watched = Path(tempfile.mkdtemp(prefix="watched-", dir=models))
    try:
        point(watched, "one")
        yield watched
    finally:
        shutil.rmtree(watched)


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in (one, two)]


def wait_for_ports(ports: list[int]) -> None:
    """Wait until nobody listens on them."""
    deadline_s = time.monotonic() + END_S
    for port in ports:
        while not is_free(port):
            assert time.monotonic() < deadline_s, f"port {port} is taken {END_S:g} seconds after the server ended"
            time.sleep(0.05)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def serve_and_call(models: Path, log: int) -> tuple[int, Any]:
    """The server's exit code, and the scores if it did not end early."""
    ports, found = free_ports(), None
    with watched_folder(models) as watched:
        command = [sys.executable, "-m", "recmill", "serve", str(watched), "--json", "--workers", "2"]
        command += ["--threads", "1", "--port", str(ports[0]), "--grpc-port", str(ports[1]), "--reload-seconds", "0.2"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            with contextlib.suppress(ServerEnded):
                found = call_all(Caller(server, ports[0]), watched)
                server.send_signal(signal.SIGTERM)
            code = server.wait(END_S)
        finally:
            if server.poll() is None:
                server.kill()
        wait_for_ports(ports)
    return code, found


def main(models: Path) -> int:
    log = os.memfd_create("server")  # on no disk that may be full
    try:
        code, found = serve_and_call(models, log)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"wrong: {error}", file=sys.stderr)
        code, found = WRONG, None
    said = os.pread(log, 1 << 24, 0).decode(errors="replace")
    print(said, file=sys.stderr, end="", flush=True)
    if code == 0 and ("Traceback" in said or found is None):
        return WRONG
    if code == 0:
        print(json.dumps(found))
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
