"""A Kubeflow Pipelines server as 2.17 answers: every node of the workflow, no reasons, logs by node.

The nodes of a run, as the server lists them (pod names of children only, states without reasons, times in seconds):

    recmill-8txz6  root-driver  root-driver(0)  root  exit-handler-1-driver  exit-handler-1-driver(0)  exit-handler-1
    generate-data-driver  generate-data-driver(0)  generate-data  executor  executor(0)  ...  exit-handler-1.onExit
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

RUN = "run-7"
WORKFLOW = "recmill-8txz6"
UNKNOWN_TIME = "1970-01-01T00:00:00Z"


def at(seconds: int) -> str:
    return f"2026-11-18T03:{seconds // 60:02d}:{seconds % 60:02d}Z"


def node(name: str, state: str, began: int | None, ended: int | None = None, child: str = "") -> dict[str, Any]:
    return {
        "run_id": RUN,
        "task_id": f"id-of-{name}-{child}-{began}",
        "display_name": name,
        "create_time": at(began or 0),
        "start_time": UNKNOWN_TIME if began is None else at(began),
        "end_time": UNKNOWN_TIME if ended is None else at(ended),
        "state": state,
        "child_tasks": [{"pod_name": f"{WORKFLOW}-{child}"}] if child else [],
    }


def frame(state: str = "RUNNING") -> list[dict[str, Any]]:
    """What surrounds the steps: the workflow, its root and the exit handler, each with a driver."""
    found = [node(WORKFLOW, state, 0), node("root", state, 8), node("exit-handler-1", state, 16)]
    for name, began in (("root-driver", 0), ("exit-handler-1-driver", 8)):
        found += [node(name, "SUCCEEDED", began, began + 8), node(f"{name}(0)", "SUCCEEDED", began, began + 8)]
    return found


def step(name: str, state: str, began: int, ended: int | None = None, *, work: str = "", pod: str = "") -> list[Any]:
    """The nodes of one step: driver, the step, its `executor` and, unless it was skipped, the pod that works."""
    drivers = [
        node(f"{name}-driver", "SUCCEEDED", began - 5, began),
        node(f"{name}-driver(0)", "SUCCEEDED", began - 5, began),
    ]
    executor = work or state
    found = [*drivers, node(name, state, began, ended), node("executor", executor, began + 1, ended, child=pod)]
    return found if executor == "SKIPPED" else [*found, node("executor(0)", executor, began + 1, ended)]


class KubeflowServer(ThreadingHTTPServer):
    """Answers with one look at the run after another; the last one stays."""

    def __init__(self, looks: list[dict[str, Any]], logs: dict[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.looks, self.logs = looks, {f"{WORKFLOW}-{pod}": text for pod, text in (logs or {}).items()}
        self.num_looks = self.num_lost = 0
        self.terminated: list[str] = []
        self.pipelines: list[dict[str, Any]] = []
        self.versions: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.schedules: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def look(state: str, *parts: list[Any]) -> dict[str, Any]:
    tasks = [*frame(state), *(task for part in parts for task in part)]
    return {"run_id": RUN, "display_name": "recmill tiny", "state": state, "run_details": {"task_details": tasks}}


class _Handler(BaseHTTPRequestHandler):
    server: KubeflowServer

    def do_GET(self) -> None:
        path, own = urlparse(self.path).path, self.server
        if path == "/apis/v2beta1/healthz":
            self.answer(200, {"multi_user": False})
        elif path == f"/apis/v2beta1/runs/{RUN}" and own.num_lost:
            own.num_lost -= 1
            self.answer(503, {"message": "upstream connect error"})
        elif path == f"/apis/v2beta1/runs/{RUN}":
            own.num_looks += 1
            self.answer(200, own.looks[min(own.num_looks, len(own.looks)) - 1])
        elif path.startswith(f"/apis/v1alpha1/runs/{RUN}/nodes/") and path.split("/")[-2] in own.logs:
            self.send(200, own.logs[path.split("/")[-2]].encode(), "text/plain")
        elif path == "/apis/v2beta1/runs":
            self.answer(
                200,
                {"runs": [{"run_id": RUN, "display_name": "recmill tiny", "state": "SUCCEEDED", "created_at": at(0)}]},
            )
        elif path == "/apis/v2beta1/recurringruns":
            self.answer(200, {"recurringRuns": own.schedules})
        elif path == "/apis/v2beta1/experiments":
            self.answer(200, {"experiments": [{"experiment_id": "e-1", "display_name": "recmill"}]})
        elif path == "/apis/v2beta1/pipelines":
            self.answer(200, {"pipelines": own.pipelines} if own.pipelines else {})
        elif path == "/apis/v2beta1/pipelines/p-1/versions":
            self.answer(200, {"pipeline_versions": own.versions})
        else:
            self.answer(404, {"message": f"no {path}"})

    def do_POST(self) -> None:
        body, path, own = self.rfile.read(int(self.headers["Content-Length"] or 0)), urlparse(self.path), self.server
        query = dict(part.split("=") for part in path.query.split("&")) if path.query else {}
        if path.path == f"/apis/v2beta1/runs/{RUN}:terminate":
            own.terminated.append(RUN)
            self.answer(200, {})
        elif path.path == "/apis/v2beta1/runs":
            own.runs.append(json.loads(body))
            self.answer(200, {"run_id": RUN, **own.runs[-1]})
        elif path.path == "/apis/v2beta1/recurringruns":
            own.schedules.append(
                {"recurring_run_id": f"r-{len(own.schedules)}", "status": "ENABLED", **json.loads(body)}
            )
            self.answer(200, own.schedules[-1])
        elif path.path == "/apis/v2beta1/pipelines/upload":
            own.pipelines.append({"pipeline_id": "p-1", "display_name": query["name"]})
            self.answer(200, own.pipelines[-1])
        elif path.path == "/apis/v2beta1/pipelines/upload_version":
            version = {
                "pipeline_id": "p-1",
                "pipeline_version_id": f"v-{len(own.versions)}",
                "display_name": query["name"],
            }
            own.versions.append(version)
            self.answer(200, version)
        else:
            self.answer(404, {"message": f"no {path.path}"})

    def do_DELETE(self) -> None:
        wanted = urlparse(self.path).path.rsplit("/", 1)[-1]
        self.server.schedules = [entry for entry in self.server.schedules if entry["recurring_run_id"] != wanted]
        self.answer(200, {})

    def answer(self, code: int, body: dict[str, Any]) -> None:
        self.send(code, json.dumps(body).encode(), "application/json")

    def send(self, code: int, payload: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(server: KubeflowServer) -> Iterator[KubeflowServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
