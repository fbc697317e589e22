"""The server's process: `python -m recmill.serving.server.process SETTINGS`, in the environment that has KServe."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from recmill.artifacts import InputError, dump_json
from recmill.artifacts.places.failures import describe_failure
from recmill.serving.server.settings import ServerSettings
from recmill.serving.server.workers import shared_metrics, supervise, tell_parent

logger = logging.getLogger("recmill.serve")
SOCKET_BACKLOG = 2048
WAIT_POLL_S = 2.0


def main(argument: str) -> int:
    """Serve until SIGTERM or SIGINT; 2 with one sentence if the server cannot start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = ServerSettings.from_argument(argument)
    try:
        if settings.workers > 1 and settings.worker < 0:
            with shared_metrics():
                _listen(settings).close()  # a port that is taken is said once, by the parent
                return supervise(settings, [sys.executable, "-m", "recmill.serving.server.process"])
        return _serve(settings)
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else describe_failure(error)
        if reason is None:
            raise  # a mistake of ours: the traceback is what a report needs
        if not tell_parent(settings, reason):  # which says it once for all workers
            print(f"recmill: error: {reason}", file=sys.stderr)
        return 2


def _serve(settings: ServerSettings) -> int:
    sys.argv = sys.argv[:1]  # KServe parses the arguments of any process that imports it
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")  # KServe's default response
    import torch

    threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.workers)
    torch.set_num_threads(threads)
    for name in ("kserve", "uvicorn.error", "kserve.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = True
    listening = _listen(settings)
    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_run(settings, listening))
    return 0


def _listen(settings: ServerSettings) -> socket.socket:
    """The port for REST. With several workers each listens on it, and the kernel distributes connections."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.workers > 1:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        found.close()
        raise InputError(f"{settings.host}:{settings.port}: cannot listen there ({error})") from None
    return found


async def _run(settings: ServerSettings, listening: socket.socket) -> None:
    from recmill.serving.server.batcher import Batcher, BatcherEvents
    from recmill.serving.server.protocol.metrics import ServerMetrics
    from recmill.serving.server.protocol.model import ProtocolModel
    from recmill.serving.server.protocol.plane import build_plane
    from recmill.serving.server.protocol.remote import grpc_server
    from recmill.serving.server.protocol.rest import RestServer
    from recmill.serving.server.versions import ServedModel, ServedVersion

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics, serving = ServerMetrics(), ""

    def reloaded(version: ServedVersion | None) -> None:
        nonlocal serving
        metrics.reloads.labels("failed" if version is None else "served").inc()
        if version is not None:
            metrics.serves(version.name, serving)
            serving = version.name

    load = partial(
        ServedModel,
        settings.model,
        max_candidates=settings.max_candidates,
        memory=settings.memory,
        cold_bytes=settings.cold_bytes,
        reloaded=reloaded,
    )
    served = await _first_version(load, settings, stop)
    if served is None:
        return
    serving = served.version.name
    metrics.serves(serving)
    batcher = Batcher(
        latency_budget_s=settings.latency_budget_s,
        max_queue=settings.max_queue,
        events=BatcherEvents(scored=metrics.scored, queued=metrics.queued),
    )
    plane, repository = build_plane(ProtocolModel(settings.name, served, batcher, metrics))
    rest = RestServer(
        "kserve.model_server:app",
        plane,
        repository,
        settings.port,
        grace_period=max(1, round(settings.grace_s)),
        metrics=metrics,
        max_bytes=settings.max_request_bytes,
        max_calls=2 * settings.max_queue + 16,
    )
    rest.create_application()
    rest.config.backlog = SOCKET_BACKLOG
    rest.server.capture_signals = NoSignals  # uvicorn would replace the handlers above
    remote = None
    if settings.grpc_port:
        address = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            remote = grpc_server(
                plane,
                repository,
                metrics,
                address=f"{address}:{settings.grpc_port}",
                max_bytes=settings.max_request_bytes,
            )
        except RuntimeError as error:
            raise InputError(f"{settings.host}:{settings.grpc_port}: cannot listen there ({error})") from None
        await remote.start()
    web = asyncio.create_task(rest.server.serve(sockets=[listening]))
    watch = asyncio.create_task(_watch(served, settings.reload_s))
    while not rest.server.started and not web.done():
        await asyncio.sleep(0.01)
    _announce(settings, served.version)
    tell_parent(settings)
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait([waiting, web], return_when=asyncio.FIRST_COMPLETED)

    plane.is_draining = True
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)  # a second signal ends the process at once
    logger.info("stopping: not ready for %g s, then calls in flight have %g s", settings.drain_s, settings.grace_s)
    await asyncio.sleep(settings.drain_s)
    watch.cancel()
    rest.server.should_exit = True
    await asyncio.gather(web, *([remote.stop(settings.grace_s)] if remote else []))
    await batcher.close()
    logger.info("stopped")


async def _first_version(load: Callable[[], Any], settings: ServerSettings, stop: asyncio.Event) -> Any:
    """The model, as soon as it is there; None if the server is stopped before."""
    deadline_s = time.monotonic() + settings.wait_s
    while not stop.is_set():
        try:
            return load()
        except InputError as error:
            if time.monotonic() >= deadline_s:
                raise
            logger.info("waiting for a model: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WAIT_POLL_S)
    return None


class NoSignals:
    """In place of uvicorn's own handlers of signals."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


async def _watch(served: Any, every_s: float) -> None:
    """Look for a new version every so often, in another thread: calls are answered meanwhile."""
    loop = asyncio.get_running_loop()
    with suppress(asyncio.CancelledError):
        while every_s > 0:
            await asyncio.sleep(every_s)
            await loop.run_in_executor(None, served.refresh)


def _announce(settings: ServerSettings, version: Any) -> None:
    rest = f"http://{settings.host}:{settings.port}"
    remote = f"{settings.host}:{settings.grpc_port}" if settings.grpc_port else None
    logger.info(
        "serving %s, version %s, on %s%s", settings.name, version.name, rest, f" and gRPC {remote}" * bool(remote)
    )
    if settings.as_json and settings.worker <= 0:
        found = {"model": str(version.folder), "name": settings.name, "version": version.name}
        print(dump_json({**found, "rest": rest, "grpc": remote, "pid": os.getpid()}), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
