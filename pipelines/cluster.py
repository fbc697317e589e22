"""Submits a compiled pipeline to a Kubeflow Pipelines server and follows the run."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click
import yaml

from recmill.artifacts import InputError

CONNECT_TIMEOUT_S = 5
FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
MAX_FAILED_POLLS = 10  # in a row, before we give up on the server


def parse_parameters(flags: tuple[str, ...], package: Path) -> dict[str, Any]:
    """Parameters from NAME=VALUE flags, checked against what the compiled pipeline takes."""
    spec = next(iter(yaml.safe_load_all(package.read_text(encoding="utf-8"))))
    known = spec["root"]["inputDefinitions"]["parameters"]
    given: dict[str, Any] = {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        if not equals or name not in known:
            raise InputError(f"--param {flag!r}: expected NAME=VALUE with one of {', '.join(known)}")
        given[name] = _parse(name, text, known[name]["parameterType"])
    missing = [name for name, entry in known.items() if name not in given and "defaultValue" not in entry]
    if missing:
        raise InputError(f"--param {missing[0]}=VALUE is missing; the pipeline has no default for it")
    return given


def _parse(name: str, text: str, kind: str) -> Any:
    parsers: dict[str, Any] = {"NUMBER_INTEGER": int, "NUMBER_DOUBLE": float, "LIST": _parse_list}
    try:
        return parsers.get(kind, str)(text)
    except ValueError:
        wanted = {"NUMBER_INTEGER": "a whole number", "LIST": "a list as JSON"}.get(kind, "a number")
        raise InputError(f"--param {name}={text!r}: expected {wanted}") from None


def _parse_list(text: str) -> list[Any]:
    loaded = json.loads(text)
    if not isinstance(loaded, list):
        raise ValueError(text)
    return loaded


def open_client(host: str, *, namespace: str | None, token: str | None) -> Any:
    """A kfp.Client; InputError within seconds if the server does not answer."""
    check_server(host, token)
    import kfp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # kfp.Client warns on every start which servers it supports
        return kfp.Client(host=host, existing_token=token, namespace=namespace or "kubeflow")


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


@contextmanager
def explain_refusals(host: str) -> Iterator[None]:
    """Turn a refusal of the server into one sentence."""
    import kfp_server_api
    from urllib3.exceptions import HTTPError

    try:
        yield
    except kfp_server_api.ApiException as error:
        text = " ".join(str(error.body or error.reason).split())
        raise InputError(f"{host}: refused with {error.status}: {text[:300]}") from error
    except HTTPError as error:
        raise InputError(f"{host}: the connection was lost ({error})") from error


def submit_run(
    client: Any,
    host: str,
    package: Path,
    parameters: Mapping[str, Any],
    *,
    experiment: str,
    name: str,
    namespace: str | None,
) -> dict[str, Any]:
    """Start a run of the package; returns its id, name and URL."""
    with explain_refusals(host), redirect_stdout(sys.stderr):
        listed = client.create_experiment(experiment, namespace=namespace)
        started = client.run_pipeline(
            experiment_id=listed.experiment_id,
            job_name=name,
            pipeline_package_path=str(package),
            params=dict(parameters),
        )
    return {"run_id": started.run_id, "name": name, "url": f"{host.rstrip('/')}/#/runs/details/{started.run_id}"}


def follow_run(client: Any, run_id: str, *, timeout_s: float, poll_s: float, is_silent: bool) -> dict[str, Any]:
    """Print state changes of the run and its tasks until it ends; returns the last state, the error and the tasks."""
    import kfp_server_api
    from urllib3.exceptions import HTTPError

    shown: dict[str, str] = {}
    lost = 0
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            run, lost = client.get_run(run_id), 0
        except (kfp_server_api.ApiException, HTTPError) as error:
            lost += 1
            if lost == MAX_FAILED_POLLS:
                raise InputError(f"run {run_id}: the server stopped answering ({error})") from error
            time.sleep(poll_s)
            continue
        states = {"run": run.state or "PENDING"} | _task_states(run)
        for what, state in states.items():
            if shown.get(what) != state and not is_silent:
                click.echo(f"{time.strftime('%H:%M:%S')} {what}: {state}", err=True)
        shown = states
        if run.state in FINAL_STATES or time.monotonic() > deadline:
            is_late = run.state not in FINAL_STATES
            reason = (
                f"still {states['run']} after {timeout_s:.0f} s" if is_late else getattr(run.error, "message", None)
            )
            return {"state": states.pop("run"), "error": reason, "tasks": states}
        time.sleep(poll_s)


def _task_states(run: Any) -> dict[str, str]:
    details = run.run_details.task_details if run.run_details else None
    # The server lists its drivers among the tasks; they add nothing to the tasks' own states.
    return {
        task.display_name: task.state or "PENDING"
        for task in details or []
        if task.display_name and not task.display_name.endswith("-driver")
    }
