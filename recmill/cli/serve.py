"""`recmill serve`."""

from __future__ import annotations

import os

import click

from recmill.cli.output import BYTES, json_option, verify_option

POSITIVE = click.IntRange(min=1)
PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("model")
@click.option("--name", default="recmill", help="Name of the model in the addresses of the protocol.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for other machines.")
@click.option("--port", type=PORT, default=8080, help="Port for REST.")
@click.option("--grpc-port", type=PORT, default=8081, help="Port for gRPC; 0 for none.")
@click.option("--workers", type=POSITIVE, default=1, help="Processes; each has the model, mapped tables are shared.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads per process; 0: cores over workers.")
@click.option(
    "--memory",
    type=click.Choice(["mapped", "resident"]),
    default="mapped",
    help="Tables are read from their files as requests need them, or into memory at the start.",
)
@click.option(
    "--table-memory",
    type=BYTES,
    help="Memory per process for rows of mapped tables beyond the most read ones, e.g. 1GiB. Default: no limit.",
)
@click.option(
    "--latency-budget-ms",
    type=click.FloatRange(min=0),
    default=20.0,
    help="Concurrent calls share a batch that is expected to be ready within this time; 0: no batches.",
)
@click.option("--max-queue", type=POSITIVE, default=256, help="Calls that may wait; further ones get 429.")
@click.option("--max-request-bytes", type=BYTES, default="8MiB", help="Largest body of a call.")
@click.option("--max-candidates", type=POSITIVE, default=10_000, help="Most candidates of a call.")
@click.option(
    "--reload-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    help="How often to look for a new version of MODEL; 0: never.",
)
@click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How long to wait at the start for MODEL to appear.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    help="On SIGTERM: how long to answer while not ready, so that load balancers turn away first.",
)
@click.option(
    "--grace-seconds", type=click.FloatRange(min=1), default=30.0, help="On SIGTERM: how long calls in flight may take."
)
@verify_option
@json_option
def serve(
    model: str,
    name: str,
    host: str,
    port: int,
    grpc_port: int,
    workers: int,
    threads: int,
    memory: str,
    table_memory: int | None,
    latency_budget_ms: float,
    max_queue: int,
    max_request_bytes: int,
    max_candidates: int,
    reload_seconds: float,
    wait_seconds: float,
    drain_seconds: float,
    grace_seconds: float,
    as_json: bool,
) -> None:
    """Answer requests with MODEL over the Open Inference Protocol v2, REST and gRPC.

    MODEL is a folder from `recmill export`, a link to one, or a folder whose entry `current` is such a link or a file
    with the folder's name. When it changes, the new version is loaded beside the old one and takes its place.

    \b
    POST /v2/models/NAME/infer          tensors; ids as the data had them if the model has a vocabulary
    POST /v1/models/NAME:predict        plain JSON: {"instances": [{"user": {...}, "candidates": [{...}]}]}
    GET  /v2/health/live, /v2/health/ready, /v2/models/NAME, /metrics

    The server runs in an environment of its own (`make setup-server`). docs/serving.md has examples.
    """
    from recmill.serving.server.environment import server_python
    from recmill.serving.server.settings import ServerSettings

    settings = ServerSettings(
        model=os.path.abspath(model),
        name=name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        workers=workers,
        threads=threads,
        memory="resident" if memory == "resident" else "mapped",
        cold_bytes=table_memory,
        latency_budget_s=latency_budget_ms / 1000,
        max_queue=max_queue,
        max_request_bytes=max_request_bytes,
        max_candidates=max_candidates,
        reload_s=reload_seconds,
        wait_s=wait_seconds,
        drain_s=drain_seconds,
        grace_s=grace_seconds,
        as_json=as_json,
    )
    python = server_python()
    # The server takes the place of this process: signals and its exit code are the command's.
    os.execv(python, [python, "-m", "recmill.serving.server.process", settings.to_argument()])
