"""Pipelines as users keep them on a server: named, with versions, and on a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.server.client import PipelinesServer
from recmill.artifacts import InputError, hash_file

CRON_FIELDS = 5
HASH_DIGITS = 12


def keep_version(server: PipelinesServer, package: Path, *, name: str) -> Any:
    """The version of the named pipeline with this YAML, uploaded if the server does not have it yet.

    A version is named after the hash of its YAML, so the same YAML never becomes a second version.
    """
    version_name = f"{name}-{hash_file(package).removeprefix('sha256:')[:HASH_DIGITS]}"
    with server.explain_refusals():
        pipeline_id = server.client.get_pipeline_id(name)
        if pipeline_id is None:
            pipeline_id = server.client.upload_pipeline(
                str(package), pipeline_name=name, namespace=server.namespace
            ).pipeline_id
        known = server.client.list_pipeline_versions(pipeline_id, page_size=100, sort_by="created_at desc")
        for version in known.pipeline_versions or []:
            if version.display_name == version_name:
                return version
        return server.client.upload_pipeline_version(str(package), version_name, pipeline_id=pipeline_id)


def schedule_runs(
    server: PipelinesServer, version: Any, parameters: Mapping[str, Any], *, cron: str, experiment: str, name: str
) -> dict[str, Any]:
    """Run a version on a schedule, without catching up on missed times; replaces a schedule of the same name."""
    expression = check_cron(cron)
    with server.explain_refusals():
        experiment_id = server.client.create_experiment(experiment, namespace=server.namespace).experiment_id
        for older in _schedules(server, experiment_id):
            if older.display_name == name:
                server.client.delete_recurring_run(older.recurring_run_id)
        made = server.client.create_recurring_run(
            experiment_id=experiment_id,
            job_name=name,
            cron_expression=expression,
            max_concurrency=1,
            no_catchup=True,
            params=dict(parameters),
            pipeline_id=version.pipeline_id,
            version_id=version.pipeline_version_id,
        )
    return {"recurring_run_id": made.recurring_run_id, "name": name, "cron": expression}


def _schedules(server: PipelinesServer, experiment_id: str) -> list[Any]:
    found: list[Any] = []
    token = ""
    while True:
        page = server.client.list_recurring_runs(page_token=token, page_size=100, experiment_id=experiment_id)
        found += page.recurring_runs or []
        token = page.next_page_token or ""
        if not token:
            return found


def check_cron(text: str) -> str:
    """The expression as Kubeflow reads it, with seconds first; people write five fields."""
    fields = text.split()
    if len(fields) == CRON_FIELDS:
        return f"0 {' '.join(fields)}"
    if len(fields) == CRON_FIELDS + 1:
        return " ".join(fields)
    raise InputError(f"--cron {text!r}: expected five fields (minute hour day month weekday), e.g. '0 3 * * *'")
