"""The Open Inference Protocol over gRPC: KServe's service with our sentences and limits."""

from __future__ import annotations

import time
from typing import Any

import grpc
from kserve import InferRequest
from kserve.errors import InvalidInput
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer

from recmill.serving.server.errors import BadRequest, CallError, NotServed, Overloaded
from recmill.serving.server.protocol.metrics import ServerMetrics
from recmill.serving.server.protocol.plane import RequestPlane, RequestRepository

ANSWER_BYTES = 64 << 20


class RequestServicer(InferenceServicer):
    """Answers calls; what is refused has a status and one sentence, and a busy server says when to come back."""

    def __init__(self, plane: RequestPlane, repository: RequestRepository, metrics: ServerMetrics) -> None:
        super().__init__(plane, repository)
        self._metrics = metrics

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        began_s, status = time.perf_counter(), "INTERNAL"
        try:
            found, refusal = await self._infer(request)
            status = "OK" if refusal is None else refusal.grpc_status
            if refusal is None:
                return found
            if isinstance(refusal, Overloaded):
                context.set_trailing_metadata((("retry-after", str(refusal.retry_after_s)),))
            return await _refuse(context, refusal)
        finally:
            self._metrics.calls.labels("grpc", status).inc()
            self._metrics.call_seconds.labels("grpc").observe(time.perf_counter() - began_s)

    async def _infer(self, request: Any) -> tuple[Any, CallError | None]:
        try:
            self._check_name(request.model_name)
            read = read_message(request)
            found, _ = await self._data_plane.infer(request=read, headers={}, model_name=request.model_name)
            return found.to_grpc(), None
        except CallError as error:
            return None, error

    def _check_name(self, name: str) -> None:
        if self._data_plane.model_registry.get_model(name) is None:
            raise NotServed(f"model_name: there is no {name[:60]!r} here")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return await self._of_model(super().ModelReady, request, context)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        found = await self._of_model(super().ModelMetadata, request, context)
        found.versions.append(self._data_plane.get_model_from_registry(request.name).served.version.name)
        return found

    async def _of_model(self, method: Any, request: Any, context: Any) -> Any:
        try:
            self._check_name(request.name)
        except NotServed as error:
            return await _refuse(context, error)
        return await method(request, context)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        return await _refuse(context, NotServed("unload: this server keeps its model until it stops"))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        try:
            await self._mode_repository_extension.load(request.model_name)
        except CallError as error:
            return await _refuse(context, error)
        return messages.RepositoryModelLoadResponse(model_name=request.model_name, isLoaded=True)


async def _refuse(context: Any, error: CallError) -> Any:
    await context.abort(grpc.StatusCode[error.grpc_status], error.sentence)


def read_message(request: Any) -> InferRequest:
    try:
        RequestServicer.validate_grpc_request(request)
        return InferRequest.from_grpc(request)
    except InvalidInput as error:
        wrong = next((entry for entry in request.inputs if "content type" in str(error)), None)
        raise BadRequest(f"input {wrong.name!r}: {error}" if wrong else f"inputs: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise BadRequest(f"inputs: cannot be read ({error})") from None


def grpc_server(
    plane: RequestPlane, repository: RequestRepository, metrics: ServerMetrics, *, address: str, max_bytes: int
) -> Any:
    """A server on that address, not started yet. Several processes may listen on one address."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_bytes),
            ("grpc.max_send_message_length", ANSWER_BYTES),
            ("grpc.so_reuseport", 1),
        ],
    )
    add_GRPCInferenceServiceServicer_to_server(RequestServicer(plane, repository, metrics), server)
    server.add_insecure_port(address)
    return server
