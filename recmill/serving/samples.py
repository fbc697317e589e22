"""Samples of a log as requests with one candidate each: what a model is measured on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recmill.data.schema import Schema
from recmill.serving.batch import Lists, RequestBatch
from recmill.serving.signature import Signature

# B = samples, F = dense features


def requests_of_samples(dense_BF: torch.Tensor, ids: Any, schema: Schema, signature: Signature) -> RequestBatch:
    """One request per sample; `ids` is the KeyedJaggedTensor, or deduplicated ids, that the reader returns."""
    plain = ids.to_kjt() if hasattr(ids, "to_kjt") else ids
    keys, edges, stride = plain.keys(), plain.offset_per_key(), plain.stride()
    lengths, values = plain.lengths(), plain.values()

    def lists(name: str) -> Lists:
        position = keys.index(name)
        own = lengths[position * stride : (position + 1) * stride].numpy()
        offsets = np.concatenate([[0], np.cumsum(own, dtype=np.int64)]).astype(np.int64)
        return np.ascontiguousarray(values[edges[position] : edges[position + 1]].numpy(), dtype=np.int64), offsets

    column = {feature.name: position for position, feature in enumerate(schema.dense)}
    dense = dense_BF.numpy()
    return RequestBatch(
        counts_R=np.ones(len(dense), dtype=np.int64),
        dense_user_RF=np.ascontiguousarray(dense[:, [column[name] for name in signature.dense_user]]),
        dense_candidate_NF=np.ascontiguousarray(dense[:, [column[name] for name in signature.dense_candidate]]),
        user_ids={feature.name: lists(feature.name) for feature in signature.of_side("user")},
        candidate_ids={feature.name: lists(feature.name) for feature in signature.of_side("candidate")},
    )
