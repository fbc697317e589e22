"""KServe's operations on the model, and how requests over REST are read."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from kserve import InferRequest, InferResponse, ModelRepository
from kserve.errors import InvalidInput
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.v2_datamodels import InferenceRequest
from pydantic import ValidationError

from recmill.serving.server.errors import BadRequest, NotServed
from recmill.serving.server.protocol.model import ProtocolModel

HEADER_LENGTH = "inference-header-content-length"  # of a body with raw tensors behind the JSON


class RequestPlane(DataPlane):
    """KServe's operations; what cannot be read is a sentence, and a draining server is not ready but answers."""

    is_draining = False

    async def ready(self) -> bool:
        return not self.is_draining

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        found: dict[str, Any] = await super().model_metadata(model_name)
        model = self.get_model_from_registry(model_name)
        return {**found, "platform": "recmill", "versions": [model.served.version.name]}

    def decode(
        self, body: Any, headers: Any, protocol_version: str = "v1", model_name: str | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if protocol_version == "v1":
            return _read_json(body), {}
        return read_infer_request(body, headers, model_name or ""), {}

    def encode(self, model_name: str, response: Any, headers: Any, req_attributes: Any) -> tuple[Any, dict[str, str]]:
        if not isinstance(response, InferResponse):
            return response, {}
        written, json_length = response.to_rest()
        return written, {} if json_length is None else {HEADER_LENGTH: str(json_length)}


def read_infer_request(body: Any, headers: dict[str, str], model_name: str) -> InferRequest:
    """The v2 request in a body that FastAPI has parsed, or in its bytes."""
    if not isinstance(body, bytes):
        return InferRequest.from_inference_request(body, model_name)
    length = headers.get(HEADER_LENGTH)
    if length is None:  # JSON that was sent with another content type, as curl does by default
        return _of_json(_read_json(body), model_name)
    if not length.isdecimal() or int(length) > len(body):
        raise BadRequest(f"{HEADER_LENGTH}: is {length[:20]!r}, expected a number of at most {len(body):,} bytes")
    given, place = _read_json(body[: int(length)]), int(length)
    request = _of_json(given, model_name)
    for entry, tensor in zip(given["inputs"], request.inputs, strict=True):
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            continue
        if type(size) is not int or size < 0 or place + size > len(body):
            raise BadRequest(f"input {tensor.name!r}: binary_data_size is {size!r}, which the body does not hold")
        tensor._raw_data = body[place : place + size]
        place += size
    return request


def _of_json(given: Any, model_name: str) -> InferRequest:
    inputs = given.get("inputs") if isinstance(given, dict) else None
    for entry in inputs if isinstance(inputs, list) else []:
        if isinstance(entry, dict) and "binary_data_size" in (entry.get("parameters") or {}):
            entry.setdefault("data", [])
    try:
        return InferRequest.from_inference_request(InferenceRequest.model_validate(given), model_name)
    except ValidationError as error:
        raise BadRequest(first_mistake(error.errors())) from None
    except InvalidInput as error:
        raise BadRequest(str(error)) from None


def _read_json(body: Any) -> Any:
    try:
        return orjson.loads(body)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise BadRequest(f"body: is not valid JSON ({error})") from None


def first_mistake(errors: Any) -> str:
    """The first of the mistakes that pydantic lists, in one sentence that names the field."""
    first = errors[0] if errors else {}
    if first.get("type") == "json_invalid":
        return f"body: is not valid JSON ({first.get('ctx', {}).get('error', 'decoding failed')})"
    words = [str(word) for word in first.get("loc", ()) if word not in ("body", "InferenceRequest", "bytes")]
    return f"{'.'.join(words) or 'body'}: {first.get('msg', 'is wrong')}"


class RequestRepository(ModelRepositoryExtension):
    """Loading looks for a new version at once. Unloading is refused: nobody may stop the server over the network."""

    async def load(self, model_name: str) -> dict[str, Any]:
        model = self._model_registry.get_model(model_name)
        if model is None:
            raise NotServed(f"model: there is no {model_name[:60]!r} here")
        await asyncio.get_running_loop().run_in_executor(None, model.served.refresh)
        return {"name": model_name, "load": True}

    async def unload(self, model_name: str) -> dict[str, Any]:
        raise NotServed("unload: this server keeps its model until it stops")


def build_plane(model: ProtocolModel) -> tuple[RequestPlane, RequestRepository]:
    registry = ModelRepository()
    registry.update(model)
    return RequestPlane(model_registry=registry), RequestRepository(model_registry=registry)
