"""KServe's view of the model."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model

from recmill.artifacts import InputError
from recmill.serving.batch import RequestBatch
from recmill.serving.server.batcher import Batcher, Scores
from recmill.serving.server.errors import BadRequest, NotServed
from recmill.serving.server.instances import instance_tensors, predictions
from recmill.serving.server.protocol.metrics import ServerMetrics
from recmill.serving.server.tensors import COUNTS, LENGTHS, CallTensor
from recmill.serving.server.versions import ServedModel, ServedVersion


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadCall:
    """A call that was understood: its requests, and the version that it was read for."""

    version: ServedVersion
    batch: RequestBatch
    request: InferRequest | None  # None: plain JSON


class ProtocolModel(Model):
    """KServe's view of the model: `preprocess` reads a call, `predict` scores it, `postprocess` writes the answer."""

    def __init__(self, name: str, served: ServedModel, batcher: Batcher, metrics: ServerMetrics) -> None:
        super().__init__(name)
        self.served, self.batcher, self.metrics = served, batcher, metrics
        self.ready = True

    def validate(self, payload: ReadCall) -> ReadCall:
        return payload

    async def preprocess(self, payload: Any, headers: Any = None) -> ReadCall:
        version = self.served.version
        if isinstance(payload, InferRequest):
            wanted = payload.model_version
            if wanted and wanted != version.name:
                raise NotServed(f"model_version: {wanted!r} is not served, the version here is {version.name!r}")
            tensors, request = [call_tensor(entry) for entry in payload.inputs], payload
        else:
            tensors, request = instance_tensors(payload, version.signature), None
        batch, unknown = version.reader.read(tensors)
        for feature, count in unknown.items():
            self.metrics.unknown_ids.labels(feature).inc(count)
        return ReadCall(version=version, batch=batch, request=request)

    async def predict(self, payload: ReadCall, headers: Any = None, response_headers: Any = None) -> Any:
        try:
            scores = await self.batcher.submit(payload.batch, payload.version.model.score)
        except InputError as error:
            raise BadRequest(str(error)) from None
        return payload, scores

    async def postprocess(self, result: Any, headers: Any = None, response_headers: Any = None) -> Any:
        call, scores = result
        labels = call.version.signature.labels
        if call.request is None:
            return predictions(scores, call.batch.counts_R.tolist(), labels)
        return answer(call.request, self.name, call.version.name, labels, scores)

    def get_input_types(self) -> list[dict[str, Any]]:
        return describe_inputs(self.served.version)

    def get_output_types(self) -> list[dict[str, Any]]:
        labels = self.served.version.signature.labels
        return [{"name": name, "datatype": "FP32", "shape": [-1]} for name in labels]


def describe_inputs(version: ServedVersion) -> list[dict[str, Any]]:
    """Inputs as the protocol's metadata lists them; lists of ids are values, with lengths beside them."""
    signature, finders = version.signature, version.reader.finders
    found = [{"name": COUNTS, "datatype": "INT64", "shape": [-1]}]
    found += [
        {"name": name, "datatype": "FP32", "shape": [-1]}
        for name in (*signature.dense_user, *signature.dense_candidate)
    ]
    for feature in signature.features:
        kind = "BYTES" if finders[feature.table].takes_text else "INT64"
        found.append({"name": feature.name, "datatype": kind, "shape": [-1]})
        found.append({"name": feature.name + LENGTHS, "datatype": "INT64", "shape": [-1]})
    return found


def call_tensor(given: Any) -> CallTensor:
    """A tensor of KServe's as ours."""
    raw = given._raw_data
    shape = list(given.shape) if isinstance(given.shape, list | tuple) else []
    data = bytes(raw) if raw is not None else given.data
    if not isinstance(data, list | bytes):
        raise BadRequest(f"input {given.name!r}: has no data")
    return CallTensor(name=given.name, datatype=str(given.datatype), shape=shape, data=data)


def answer(request: InferRequest, name: str, version: str, labels: tuple[str, ...], scores: Scores) -> InferResponse:
    """One tensor per label with one score per candidate."""
    columns = scores.reshape(-1, len(labels))
    outputs = [
        InferOutput(name=label, shape=[len(columns)], datatype="FP32", data=np.ascontiguousarray(columns[:, at]))
        for at, label in enumerate(labels)
    ]
    return InferResponse(
        response_id=request.id or str(uuid.uuid4()),
        model_name=name,
        model_version=version,
        infer_outputs=outputs,
        use_binary_outputs=request.use_binary_outputs is True and not request.from_grpc,
        requested_outputs=None if request.from_grpc else request.request_outputs,
    )
