"""How far a training is, where Kubeflow shows it: `status.trainerStatus` of the TrainJob.

With its feature gate TrainJobStatus, Kubeflow Trainer gives every pod of a TrainJob the address of its status server, a
token and a certificate. Reports are best effort: a server that is missing, slow or failing never delays a step.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from recmill.progress import Progress

URL, TOKEN, CERTIFICATE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
INTERVAL_S = 5.0  # between two reports; the server allows five per second from all TrainJobs together
MAX_INTERVAL_S = 300.0  # after failures
TIMEOUT_S = 5.0
TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class StatusServer:
    url: str
    token: Path  # a file, which Kubernetes renews
    certificate: Path

    @classmethod
    def from_environment(cls) -> Self | None:
        """The server of this pod's TrainJob; None without one."""
        if not all(os.environ.get(name) for name in (URL, TOKEN, CERTIFICATE)):
            return None
        return cls(url=os.environ[URL], token=Path(os.environ[TOKEN]), certificate=Path(os.environ[CERTIFICATE]))

    def send(self, status: Mapping[str, Any]) -> None:
        """Replace the TrainJob's status; raises OSError, ValueError or HTTPException."""
        headers = {"Authorization": f"Bearer {self.token.read_text().strip()}", "Content-Type": "application/json"}
        request = Request(self.url, data=json.dumps({"trainerStatus": status}).encode(), headers=headers)
        context = ssl.create_default_context(cafile=str(self.certificate))
        # The server is inside the cluster: a proxy for the outside does not know it.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(request, timeout=TIMEOUT_S):
            pass

    @contextmanager
    def reporting(self, out: Path, *, interval_s: float = INTERVAL_S) -> Iterator[Progress]:
        """A progress that a thread sends to the server while the block runs; losses are read from OUT/metrics.jsonl."""
        latest: list[tuple[int, int, float]] = []  # (done, total, when): the first of this start and the newest
        is_over = threading.Event()

        def note(what: str, done: int, total: int) -> None:
            if what == "train step" and total:
                latest[1:] = [(done, total, time.monotonic())]

        def work() -> None:
            wait_s, sent, has_failed = interval_s, 0, False
            while True:
                is_last = is_over.wait(wait_s)
                newest = latest[-1] if latest else None
                if newest and newest[0] != sent:
                    try:
                        self.send(describe_status(latest[0], newest, read_last_line(out / "metrics.jsonl")))
                        wait_s, sent = interval_s, newest[0]
                    except (OSError, ValueError, HTTPException) as error:
                        wait_s = min(2 * wait_s, MAX_INTERVAL_S)
                        if not has_failed:
                            print(f"the TrainJob's status server does not answer: {error}", file=sys.stderr, flush=True)
                        has_failed = True
                if is_last:
                    return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield note
        finally:
            is_over.set()
            thread.join(timeout=TIMEOUT_S)


def describe_status(
    first: tuple[int, int, float], newest: tuple[int, int, float], logged: Mapping[str, Any]
) -> dict[str, Any]:
    """trainerStatus from two looks (steps done, steps in total, when) and the newest entry of the loss curve."""
    (begun, _, since), (done, total, now) = first, newest
    status: dict[str, Any] = {
        "progressPercentage": min(100, 100 * done // total),
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "metrics": [{"name": "step", "value": str(done)}, {"name": "num_steps", "value": str(total)}],
    }
    if done > begun:
        status["estimatedRemainingSeconds"] = round((now - since) / (done - begun) * (total - done))
    if "loss" in logged:
        status["metrics"].append({"name": "loss", "value": f"{logged['loss']:.6g}"})
    return status


def read_last_line(path: Path) -> dict[str, Any]:
    """The last entry of a growing file of JSON lines; {} if there is none yet."""
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        complete = file.read().rpartition(b"\n")[0]
    last = complete.rpartition(b"\n")[2]
    return dict(json.loads(last)) if last else {}
