"""The plain JSON form of a call, at KServe's v1 address: one object per request.

{"instances": [{"user": {"age": 31, "history": ["sku-1", "sku-7"]},
                "candidates": [{"item": "sku-2", "price": 9.5}, {"item": "sku-3", "price": 4}]}]}

{"predictions": [[0.12, 0.7]]}          with several labels [{"click": [0.12, 0.7], "buy": [0.01, 0.03]}]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.serving.server.errors import BadRequest
from recmill.serving.server.tensors import COUNTS, LENGTHS, CallTensor
from recmill.serving.signature import Side, Signature


def instance_tensors(body: Any, signature: Signature) -> list[CallTensor]:
    """The tensors of a call in plain JSON."""
    instances = body.get("instances") if isinstance(body, Mapping) else None
    if not isinstance(instances, list) or not instances:
        raise BadRequest('instances: expected a list such as [{"user": {...}, "candidates": [{...}]}]')
    rows: dict[Side, list[tuple[str, Mapping[str, Any]]]] = {"user": [], "candidate": []}
    for number, entry in enumerate(instances):
        where = f"instances[{number}]"
        if not isinstance(entry, dict) or not set(entry) <= {"user", "candidates"}:
            raise BadRequest(f"{where}: expected an object with the keys user and candidates")
        user, candidates = entry.get("user", {}), entry.get("candidates")
        if not isinstance(candidates, list):
            raise BadRequest(f"{where}.candidates: expected a list of objects")
        for place, row in (("user", user), *((f"candidates[{at}]", row) for at, row in enumerate(candidates))):
            if not isinstance(row, dict):
                raise BadRequest(f"{where}.{place}: expected an object such as {{feature: value}}")
            rows["user" if place == "user" else "candidate"].append((f"{where}.{place}", row))
    counts = [len(entry["candidates"]) for entry in instances]
    tensors = [CallTensor(name=COUNTS, datatype="INT64", shape=[len(counts)], data=counts)]
    dense_of: dict[Side, tuple[str, ...]] = {"user": signature.dense_user, "candidate": signature.dense_candidate}
    for side, dense in dense_of.items():
        features = [feature.name for feature in signature.features if feature.side == side]
        known = {*dense, *features}
        for where, row in rows[side]:
            extra = next((name for name in row if name not in known), None)
            if extra is not None:
                listed = ", ".join((*dense, *features)) or "none"
                raise BadRequest(f"{where}.{extra}: no feature of the {side}; those are {listed}")
        tensors += [_dense_column(name, rows[side]) for name in dense]
        for name in features:
            tensors += _id_lists(name, rows[side])
    return tensors


def _dense_column(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> CallTensor:
    """Numbers; null is NaN, which the model's rules for the feature replace."""
    for where, row in rows:
        if name not in row or isinstance(row[name], bool) or not isinstance(row[name], int | float | None):
            raise BadRequest(f"{where}.{name}: expected a number, received {_shown(row, name)}")
    data = [math.nan if row[name] is None else row[name] for _, row in rows]
    return CallTensor(name=name, datatype="FP64", shape=[len(rows)], data=data)


def _shown(row: Mapping[str, Any], name: str) -> str:
    return repr(row[name])[:60] if name in row else "nothing"


def _id_lists(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[CallTensor]:
    """Values and lengths; a single id stands for a list of one, null for an empty list."""
    values: list[Any] = []
    lengths = []
    for where, row in rows:
        entry = row.get(name)
        ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise BadRequest(f"{where}.{name}: ids are whole numbers or texts, received {repr(value)[:60]}")
        values += ids
        lengths.append(len(ids))
    texts = any(isinstance(value, str) for value in values)
    if not texts and any(not -(2**63) <= value < 2**63 for value in values):
        raise BadRequest(f"{rows[0][0]}.{name}: ids must fit INT64")
    data = [str(value) for value in values] if texts else values
    kind = "BYTES" if texts else "INT64"
    return [
        CallTensor(name=name, datatype=kind, shape=[len(data)], data=data),
        CallTensor(name=name + LENGTHS, datatype="INT64", shape=[len(lengths)], data=lengths),
    ]


def predictions(scores: npt.NDArray[np.float32], counts: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """The answer in plain JSON: per request the scores of its candidates, in their order."""
    parts = np.split(scores, np.cumsum(counts)[:-1])
    if len(labels) == 1:
        return {"predictions": [part.ravel().tolist() for part in parts]}
    return {"predictions": [{name: part[:, at].tolist() for at, name in enumerate(labels)} for part in parts]}
