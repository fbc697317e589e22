"""The Open Inference Protocol over gRPC: KServe's service with our sentences and limits."""

from __future__ import annotations

import time
from typing import Any

import grpc
from kserve import InferRequest
from kserve.errors import InvalidInput
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
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
            if self._data_plane.model_registry.get_model(request.model_name) is None:
                raise NotServed(f"model_name: there is no {request.model_name[:60]!r} here")
            read = read_message(request)
            found, _ = await self._data_plane.infer(request=read, headers={}, model_name=request.model_name)
            status = "OK"
            return found.to_grpc()
        except CallError as error:
            status = error.grpc_status
            if isinstance(error, Overloaded):
                context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
            return await context.abort(grpc.StatusCode[status], error.sentence)
        finally:
            self._metrics.calls.labels("grpc", status).inc()
            self._metrics.call_seconds.labels("grpc").observe(time.perf_counter() - began_s)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        found = await super().ModelMetadata(request, context)
        found.versions.append(self._data_plane.get_model_from_registry(request.name).served.version.name)
        return found

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unload: this server keeps its model until it stops")

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        try:
            await self._mode_repository_extension.load(request.model_name)
        except CallError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], error.sentence)
        return messages.RepositoryModelLoadResponse(model_name=request.model_name, isLoaded=True)


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
        interceptors=(ExceptionToStatusInterceptor(),),
        options=[
            ("grpc.max_receive_message_length", max_bytes),
            ("grpc.max_send_message_length", ANSWER_BYTES),
            ("grpc.so_reuseport", 1),
        ],
    )
    add_GRPCInferenceServiceServicer_to_server(RequestServicer(plane, repository, metrics), server)
    server.add_insecure_port(address)
    return server
