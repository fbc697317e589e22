"""Connects to a Kubeflow Pipelines server: submissions, runs, logs, each refusal in one sentence."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError

CONNECT_TIMEOUT_S = 5
LOG_TIMEOUT_S = 20
MAX_LOG_BYTES = 4 * 2**20  # a step's own lines are few; its last ones say how it ended


class ServerLost(Exception):
    """The server did not answer; it may be restarting."""


@dataclass(frozen=True, kw_only=True)
class PipelinesServer:
    """One server and how to talk to it. `client` is a kfp.Client."""

    host: str
    client: Any
    namespace: str | None = None
    token: str | None = None

    def run_url(self, run_id: str) -> str:
        return f"{self.host.rstrip('/')}/#/runs/details/{run_id}"

    def log_url(self, run_id: str, node: str) -> str:
        """Where the server shows the log of a pod of the run."""
        return f"{self.host.rstrip('/')}/apis/v1alpha1/runs/{run_id}/nodes/{node}/log"

    def get_run(self, run_id: str) -> Any:
        """The run as the server knows it; ServerLost if it does not answer, InputError if there is no such run."""
        import kfp_server_api
        from urllib3.exceptions import HTTPError

        try:
            return self.client.get_run(run_id)
        except kfp_server_api.ApiException as error:
            if error.status == 404:
                raise InputError(f"{self.host}: has no run {run_id}") from None
            if error.status in (401, 403):
                raise InputError(f"{self.host}: refuses access ({error.status}); check --token") from None
            raise ServerLost(f"answers {error.status}") from error
        except HTTPError as error:
            raise ServerLost(str(error)) from error

    def read_log(self, run_id: str, node: str) -> str | None:
        """The log of a pod of the run, also after the pod is gone; None if the server has none."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.log_url(run_id, node), headers=headers), timeout=LOG_TIMEOUT_S
            ) as answer:
                text: bytes = answer.read(MAX_LOG_BYTES)
        except (OSError, HTTPException, ValueError):
            return None
        return text.decode(errors="replace")

    @contextmanager
    def explain_refusals(self) -> Iterator[None]:
        """Turn a refusal of the server into one sentence; the client's own lines about links are not shown."""
        import kfp_server_api
        from urllib3.exceptions import HTTPError

        try:
            with redirect_stdout(io.StringIO()):
                yield
        except kfp_server_api.ApiException as error:
            text = " ".join(str(error.body or error.reason).split())
            raise InputError(f"{self.host}: refused with {error.status}: {text[:300]}") from error
        except HTTPError as error:
            raise InputError(f"{self.host}: the connection was lost ({error})") from error


def open_server(host: str, *, namespace: str | None, token: str | None) -> PipelinesServer:
    """The server at a URL; InputError within seconds if it does not answer."""
    check_server(host, token)
    import kfp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # kfp.Client warns on every start which servers it supports
        client = kfp.Client(host=host, existing_token=token, namespace=namespace or "kubeflow")
    return PipelinesServer(host=host, client=client, namespace=namespace, token=token)


def check_server(host: str, token: str | None) -> None:
    """Query the server's health. kfp.Client would do so too, but five times over half a minute."""
    if not host.startswith(("http://", "https://")):
        raise InputError(f"--host {host}: expected a URL that starts with http:// or https://")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{host.rstrip('/')}/apis/v2beta1/healthz", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as response:
            json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError(f"{host}: refuses access ({error.code}); check --token") from None
        raise InputError(f"{host}: answers {error.code}; is this a Kubeflow Pipelines server?") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{host}: answers, but not as a Kubeflow Pipelines server does") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"{host}: no Kubeflow Pipelines server answers there ({reason})") from None


def submit_run(
    server: PipelinesServer,
    package: Path,
    parameters: Mapping[str, Any],
    *,
    experiment: str,
    name: str,
    version: Any = None,
) -> dict[str, Any]:
    """Start a run of the package, or of an uploaded version of it; returns the run's id, name and URL."""
    if version is None:
        source = {"pipeline_package_path": str(package)}
    else:
        source = {"pipeline_id": version.pipeline_id, "version_id": version.pipeline_version_id}
    with server.explain_refusals():
        listed = server.client.create_experiment(experiment, namespace=server.namespace)
        started = server.client.run_pipeline(
            experiment_id=listed.experiment_id, job_name=name, params=dict(parameters), **source
        )
    return {"run_id": started.run_id, "name": name, "url": server.run_url(started.run_id)}
