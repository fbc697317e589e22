"""The few cluster operations that the tests need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def find_kubectl(overlay: Path) -> str | None:
    """KUBECTL, or the first kubectl on the PATH that can render our overlays: 1.27 or newer."""
    if given := os.environ.get("KUBECTL"):
        return given
    for folder in os.get_exec_path():
        found = shutil.which("kubectl", path=folder)
        if found and not subprocess.run([found, "kustomize", overlay], capture_output=True, check=False).returncode:
            return found
    return None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    kubectl: str

    def run(self, *args: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl with these arguments; if it fails, the error has its output."""
        done = subprocess.run([self.kubectl, *args], input=text, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stderr or done.stdout}")
        return done

    def answers(self) -> bool:
        return self.run("version", "--request-timeout=5s", check=False).returncode == 0

    def get(self, kind: str, name: str = "", *, namespace: str, selector: str = "") -> dict[str, Any]:
        flags = ["--selector", selector] if selector else []
        args = ["get", kind, *([name] if name else []), "--namespace", namespace, "--output", "json", *flags]
        found: dict[str, Any] = json.loads(self.run(*args).stdout)
        return found

    def apply(self, *objects: dict[str, Any], namespace: str | None = None, flags: tuple[str, ...] = ()) -> str:
        """Server-side apply."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        where = ["--namespace", namespace] if namespace else []
        return self.run("apply", "--server-side", "--filename", "-", *where, *flags, text=text).stdout

    def delete(self, kind: str, name: str, *, namespace: str) -> None:
        self.run("delete", kind, name, "--namespace", namespace, "--ignore-not-found", "--wait=true")

    def logs(self, pod: str, *, namespace: str) -> str:
        return self.run("logs", pod, "--namespace", namespace, check=False).stdout

    def render(self, overlay: Path) -> str:
        return self.run("kustomize", str(overlay)).stdout

    def pods(self, selector: str, *, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("pods", namespace=namespace, selector=selector)["items"]
        return found

    def finish_job(self, name: str, *, namespace: str, timeout_s: float = 300) -> dict[str, Any]:
        """Wait for a Job to end; if it failed, fail with the pod's log."""
        job: dict[str, Any] = wait_until(
            lambda: self.ended(name, namespace),
            timeout_s=timeout_s,
            what=f"job {name}",
            describe=self.describe(name, namespace),
        )
        if job["status"].get("succeeded"):
            return job
        raise AssertionError(f"job {name} failed\n{self.describe(name, namespace)()}")

    def ended(self, name: str, namespace: str) -> dict[str, Any] | None:
        """The Job if it has ended."""
        job = self.get("job", name, namespace=namespace)
        types = {entry["type"] for entry in job["status"].get("conditions", []) if entry["status"] == "True"}
        return job if types & {"Complete", "Failed"} else None

    def describe(self, name: str, namespace: str) -> Callable[[], str]:
        def said() -> str:
            pods = self.pods(f"job-name={name}", namespace=namespace)
            parts = [
                f"{pod['metadata']['name']}: {json.dumps(pod['status'].get('containerStatuses', []))}" for pod in pods
            ]
            return "\n".join(
                [*parts, *(self.logs(pod["metadata"]["name"], namespace=namespace)[-4000:] for pod in pods)]
            )

        return said


def wait_until(
    look: Callable[[], Any],
    *,
    timeout_s: float,
    what: str,
    describe: Callable[[], str] = lambda: "",
    every_s: float = 1.0,
) -> Any:
    """Poll `look` until it returns something."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s\n{describe()}")
        time.sleep(every_s)
