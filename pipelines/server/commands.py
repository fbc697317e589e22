"""The commands that come back to runs on a Kubeflow Pipelines server: `recmill runs`, `wait` and `stop`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipelines.server.client import PipelinesServer, open_server
from pipelines.server.following import FINAL_STATES, RunFollower, follow_run, print_event, print_event_as_json
from recmill.artifacts import InputError
from recmill.cli.output import emit, json_option

F = TypeVar("F", bound=Callable[..., Any])


def _require_host(ctx: click.Context, param: click.Parameter, host: str | None) -> str:
    if not host:
        raise InputError("no host: give --host URL or set RECMILL_KFP_HOST")
    return host


def server_options(command: F) -> F:
    """`--host`, `--namespace` and `--token` of a Kubeflow Pipelines server."""
    hosts = ["RECMILL_KFP_HOST", "KFP_HOST", "KF_PIPELINES_ENDPOINT"]
    namespaces = ["RECMILL_KFP_NAMESPACE", "KFP_NAMESPACE"]
    about = "Bearer token; prefer the environment variable RECMILL_KFP_TOKEN."
    for option in (
        click.option("--token", envvar=["RECMILL_KFP_TOKEN", "KFP_TOKEN"], help=about),
        click.option("--namespace", envvar=namespaces, help="Namespace on a multi-user server. Default: kubeflow."),
        click.option("--host", envvar=hosts, callback=_require_host, help="URL of the Kubeflow Pipelines API."),
    ):
        command = option(command)
    return command


def waiting_options(command: F) -> F:
    """`--timeout` and `--poll-interval` of commands that follow a run."""
    for option in (
        click.option("--poll-interval", "poll_s", type=float, default=5, help="Polling interval in seconds."),
        click.option("--timeout", "timeout_s", type=float, default=86_400, help="Maximum waiting time in seconds."),
    ):
        command = option(command)
    return command


def wait_for_run(
    server: PipelinesServer, run_id: str, *, timeout_s: float, poll_s: float, as_json: bool
) -> dict[str, Any]:
    """Follow a run to its end. Ctrl-C leaves it running and says how to come back."""
    report = print_event_as_json if as_json else print_event
    follower = RunFollower(server=server, run_id=run_id, report=report)
    try:
        return follow_run(follower, timeout_s=timeout_s, poll_s=poll_s)
    except KeyboardInterrupt:
        click.echo(
            f"\nthe run goes on: {server.run_url(run_id)}\n"
            f"  recmill wait {run_id} --host {server.host}    follow it again\n"
            f"  recmill stop {run_id} --host {server.host}    stop it\n"
            f"  recmill runs --host {server.host}    list runs",
            err=True,
        )
        sys.exit(130)


def finish_waiting(outcome: dict[str, Any], run_id: str, *, as_json: bool) -> None:
    """Print how the run ended; exit code 1 unless it succeeded."""
    said = ": ".join(filter(None, (outcome["state"], outcome.get("error"))))
    emit(outcome, [f"run {run_id} {said}"], as_json=as_json)
    if outcome["state"] != "SUCCEEDED":
        sys.exit(1)


@click.command()
@click.argument("run_id")
@server_options
@waiting_options
@json_option
def wait(run_id: str, as_json: bool, timeout_s: float, poll_s: float, **where: Any) -> None:
    """Follow the run RUN_ID to its end: one line per step, and the reason if one fails."""
    outcome = wait_for_run(open_server(**where), run_id, timeout_s=timeout_s, poll_s=poll_s, as_json=as_json)
    finish_waiting({"run_id": run_id, **outcome}, run_id, as_json=as_json)


@click.command()
@click.argument("run_id")
@server_options
@json_option
def stop(run_id: str, as_json: bool, **where: Any) -> None:
    """Stop the run RUN_ID; its last step still closes the run in MLflow."""
    server = open_server(**where)
    state = server.get_run(run_id).state
    if state not in FINAL_STATES:
        with server.explain_refusals():
            server.client.terminate_run(run_id)
    text = f"run {run_id} has already ended ({state})" if state in FINAL_STATES else f"run {run_id} is stopping"
    emit({"run_id": run_id, "was": state}, [text], as_json=as_json)


@click.command()
@click.option("--experiment", help="Only runs of this experiment. Default: all.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, help="Number of newest runs.")
@server_options
@json_option
def runs(experiment: str | None, limit: int, as_json: bool, **where: Any) -> None:
    """List the newest runs on the server, and what runs on a schedule."""
    server = open_server(**where)
    with server.explain_refusals():
        chosen = None
        if experiment:
            chosen = server.client.get_experiment(experiment_name=experiment, namespace=server.namespace).experiment_id
        options = {"experiment_id": chosen, "namespace": server.namespace, "page_size": limit}
        found = server.client.list_runs(sort_by="created_at desc", **options).runs or []
        scheduled = server.client.list_recurring_runs(sort_by="created_at desc", **options).recurring_runs or []
    listed = [_row(run, server.run_url(run.run_id)) for run in found]
    schedules = [
        {
            "recurring_run_id": entry.recurring_run_id,
            "name": entry.display_name,
            "cron": entry.trigger.cron_schedule.cron if entry.trigger and entry.trigger.cron_schedule else None,
            "status": entry.status,
        }
        for entry in scheduled
    ]
    lines = [f"{row['state']:<10} {row['created']:<17} {row['run_id']}  {row['name']}" for row in listed]
    lines += [
        f"{entry['status'] or '':<10} {entry['cron'] or '':<17} {entry['recurring_run_id']}  {entry['name']}"
        for entry in schedules
    ]
    emit({"runs": listed, "schedules": schedules}, lines or ["no runs"], as_json=as_json)


def _row(run: Any, url: str) -> dict[str, Any]:
    created = run.created_at.strftime("%Y-%m-%d %H:%M") if run.created_at else ""
    return {
        "run_id": run.run_id,
        "name": run.display_name,
        "state": run.state or "PENDING",
        "created": created,
        "url": url,
    }
