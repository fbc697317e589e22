"""A faulty S3 server in a process of its own: moto behind a layer that delays, refuses and cuts short."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUSY = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected</Message></Error>"


class FaultyStore:
    """WSGI: between /-/begin and /-/end, faults of one kind; after /-/leave every request fails."""

    def __init__(self, store: Callable[..., Any], kind: str, seed: int) -> None:
        self.store, self.kind, self.draw = store, kind, random.Random(seed)
        self.is_faulty = self.is_away = False

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/-/"):
            self.is_faulty, self.is_away = path == "/-/begin" or path == "/-/leave", path == "/-/leave"
            start_response("200 OK", [])
            return [b""]
        if self.is_away:
            return self._refuse(start_response)
        if self.is_faulty and self.draw.random() < 0.15:
            if self.kind == "errors":
                return self._refuse(start_response)
            if self.kind == "slow":
                time.sleep(self.draw.uniform(0.2, 1.5))
            elif self.kind == "short reads" and environ["REQUEST_METHOD"] == "GET":
                return self._cut_short(environ, start_response)
        return self.store(environ, start_response)

    def _refuse(self, start_response: Callable[..., Any]) -> Iterable[bytes]:
        code = self.draw.choice(["InternalError", "SlowDown", "ServiceUnavailable"])
        start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
        return [BUSY % code.encode()]

    def _cut_short(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """The answer's headers, and the first half of its bytes."""
        body = b"".join(self.store(environ, start_response))
        return [body[: len(body) // 2]]


def serve(port_file: str, kind: str, seed: str) -> None:
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = FaultyStore(DomainDispatcherApplication(create_backend_app), kind, int(seed))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="faults")
    Path(port_file).with_suffix(".new").write_text(address)
    Path(port_file).with_suffix(".new").rename(port_file)
    sys.stdin.read()  # until whoever started it is gone


@contextmanager
def serve_apart(port_file: Path, *, kind: str, seed: int) -> Iterator[str]:
    """The address of a server with the bucket `faults`."""
    command = [sys.executable, "-m", "tests.faults.store", str(port_file), kind, str(seed)]
    with open(port_file.with_suffix(".log"), "w") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(port_file.with_suffix(".log").read_text()[-2000:])
            time.sleep(0.05)
        yield port_file.read_text()
    finally:
        server.kill()
        server.wait()
        port_file.unlink(missing_ok=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
