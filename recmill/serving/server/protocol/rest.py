"""REST: KServe's endpoints, with our limits at the door and one sentence for every mistake."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from kserve.errors import InvalidInput, ModelNotFound, ModelNotReady, ServerNotReady
from kserve.protocol.rest.server import RESTServer
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from starlette.exceptions import HTTPException

from recmill.serving.server.errors import BadRequest, CallError, Overloaded, TooLarge
from recmill.serving.server.protocol.metrics import ServerMetrics, render_metrics
from recmill.serving.server.protocol.plane import first_mistake

BODY_TIMEOUT_S = 30.0

logger = logging.getLogger("recmill.serve")


class RestServer(RESTServer):
    """KServe's REST server with our limits at the door and our error answers."""

    def __init__(self, *given: Any, metrics: ServerMetrics, max_bytes: int, max_calls: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._metrics, self._max_bytes, self._max_calls = metrics, max_bytes, max_calls

    @property
    def server(self) -> Any:
        return self._server

    def _add_middlewares(self, app: FastAPI) -> None:
        app.add_middleware(Door, metrics=self._metrics, max_bytes=self._max_bytes, max_calls=self._max_calls)

    def _register_endpoints(self, app: FastAPI) -> None:
        app.add_api_route("/metrics", _metrics_page, methods=["GET"])
        app.add_api_route("/", self.dataplane.live, methods=["GET"])
        register_v1_endpoints(app, self.dataplane, self.model_repository_extension)
        register_v2_endpoints(app, self.dataplane, self.model_repository_extension)

    def _add_exception_handlers(self, app: FastAPI) -> None:
        for kind, handler in HANDLERS.items():
            app.add_exception_handler(kind, handler)


def _metrics_page() -> Response:
    page, kind = render_metrics()
    return Response(content=page, media_type=kind)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CallError)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    return JSONResponse({"error": error.sentence}, status_code=error.status, headers=headers)


async def _misread(_: Request, error: Exception) -> JSONResponse:
    sentence = first_mistake(error.errors()) if isinstance(error, RequestValidationError) else str(error)
    return JSONResponse({"error": sentence}, 400)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    known = {
        400: "body: cannot be read as JSON",
        404: "address: there is nothing here",
        405: "method: not allowed at this address",
    }
    sentence = known.get(error.status_code, str(error.detail))
    return JSONResponse({"error": sentence}, error.status_code, headers=error.headers)


async def _not_found(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": f"model: {error}"}, 404)


async def _not_ready(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error) or "the server is stopping"}, 503)


async def _not_offered(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "address: no such operation; call a model without a version in the address"}, 404)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    logger.error("a call failed", exc_info=error)
    return JSONResponse({"error": "the call failed inside the server; its log says why"}, 500)


HANDLERS = {
    CallError: _refused,
    InvalidInput: _misread,
    RequestValidationError: _misread,
    HTTPException: _http_error,
    ModelNotFound: _not_found,
    ModelNotReady: _not_ready,
    ServerNotReady: _not_ready,
    NotImplementedError: _not_offered,
    Exception: _failed,
}


class Door:
    """Reads each body before anything else sees it: at most `max_bytes`, at most `max_calls` at a time."""

    def __init__(self, app: Any, *, metrics: ServerMetrics, max_bytes: int, max_calls: int) -> None:
        self.app, self.metrics, self.max_bytes, self.max_calls = app, metrics, max_bytes, max_calls
        self.inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), 0

        async def send_counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.inside += 1
        try:
            try:
                body = await self._read(scope, receive)
            except CallError as error:
                await (await _refused(Request(scope), error))(scope, receive, send_counted)
                return
            began_s = time.perf_counter()
            await self.app(scope, _replay(body, receive), send_counted)
        finally:
            self.inside -= 1
            self.metrics.calls.labels("rest", str(status or 499)).inc()
            self.metrics.call_seconds.labels("rest").observe(time.perf_counter() - began_s)

    async def _read(self, scope: Any, receive: Any) -> bytes:
        if self.inside > self.max_calls:
            raise Overloaded(f"the server is busy: it is reading {self.max_calls:,} calls", retry_after_s=1)
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self.max_bytes:
            raise TooLarge(f"body: has {int(said):,} bytes, at most {self.max_bytes:,} are allowed")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise BadRequest("body: ended early")
                    body += message.get("body", b"")
                    if len(body) > self.max_bytes:
                        raise TooLarge(
                            f"body: has more than {self.max_bytes:,} bytes, which is the most that is allowed"
                        )
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise BadRequest(f"body: did not arrive within {math.floor(BODY_TIMEOUT_S)} seconds") from None


def _replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    is_sent = False

    async def replay() -> Any:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
