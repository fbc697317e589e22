"""A Kubernetes API server that gives recorded answers about the pods of a run, and a KUBECONFIG for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

# As Kubernetes 1.34 writes it for a pod of the stock workflow controller.
NO_ROOM = (
    "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: "
    "1 No preemption victims found for incoming pod."
)


def unschedulable_pod(name: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
    return _pod(name, {"phase": "Pending", "conditions": [condition], "qosClass": "Burstable"})


def killed_pod(name: str) -> dict[str, Any]:
    """A pod whose container `main` was killed at its limit; Argo's container `wait` ended well."""
    ended = {"exitCode": 137, "reason": "OOMKilled"}
    containers = [_container("main", ended), _container("wait", {"exitCode": 0, "reason": "Completed"})]
    return _pod(name, {"phase": "Failed", "containerStatuses": containers})


def _container(name: str, ended: dict[str, Any]) -> dict[str, Any]:
    own = {"image": f"recmill/{name}", "imageID": "", "ready": False, "restartCount": 0, "lastState": {}}
    return {"name": name, "state": {"terminated": ended}, **own}


def _pod(name: str, status: dict[str, Any]) -> dict[str, Any]:
    limits = {"resources": {"limits": {"cpu": "2", "memory": "6Gi"}}}
    spec = {"containers": [{"name": "main", **limits}, {"name": "wait"}]}
    return {"metadata": {"name": name, "labels": {"pipeline/runid": "run-7"}}, "spec": spec, "status": status}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = urlparse(self.path)
        is_ours = parse_qs(asked.query).get("labelSelector") == ["pipeline/runid=run-7"]
        pods = self.server.pods if asked.path == "/api/v1/namespaces/kubeflow/pods" and is_ours else []  # type: ignore[attr-defined]
        payload = json.dumps({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": pods}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def cluster_with(pods: list[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """The KUBECONFIG of a cluster that has these pods."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.pods = pods  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    path = folder / "kubeconfig"
    named = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}))
    try:
        yield path
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
