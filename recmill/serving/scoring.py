"""Scores requests: the user's features are looked up, pooled and encoded once per request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from recmill.data.schema import Schema
from recmill.model.encoders import SequenceWindows
from recmill.model.ranker import Ranker
from recmill.serving.batch import Lists, RequestBatch
from recmill.serving.signature import Signature
from recmill.serving.tables import RowSource, pool_lists

# R = requests, N = candidates, F = dense features, D = embedding width


class RequestScorer:
    """Logits [N], or [N, labels], of the candidates of a batch of requests."""

    def __init__(self, ranker: Ranker, tables: Mapping[str, RowSource], *, signature: Signature, limit: int) -> None:
        self.ranker, self.tables, self.signature, self.limit = ranker.eval(), tables, signature, limit
        self.schema: Schema = ranker.schema
        self.user_names = frozenset(feature.name for feature in signature.of_side("user"))
        position = {name: n for n, name in enumerate((*signature.dense_user, *signature.dense_candidate))}
        self._dense_order = [position[feature.name] for feature in self.schema.dense]

    def __call__(self, batch: RequestBatch) -> Tensor:
        request_N = torch.from_numpy(np.repeat(np.arange(batch.num_requests), batch.counts_R))
        pooled: dict[str, Tensor] = {}
        sequences: dict[str, SequenceWindows] = {}
        for feature in self.schema.id_features:
            lists = (batch.user_ids if feature.name in self.user_names else batch.candidate_ids)[feature.name]
            table = self.tables[feature.table]
            if feature.kind == "sequence":
                sequences[feature.name] = self._windows(table, lists)
            else:
                pooled[feature.name] = pool_lists(table, *lists, is_mean=feature.pooling == "mean")
        inverse = dict.fromkeys(self.user_names, request_N)
        logits: Tensor = self.ranker(self._dense(batch, request_N), pooled, sequences, inverse)
        return logits

    def _windows(self, table: RowSource, lists: Lists) -> SequenceWindows:
        values, offsets = lists
        rows_ND = table.rows(torch.from_numpy(values))
        return SequenceWindows.of_lists(rows_ND, torch.from_numpy(np.diff(offsets)), max_length=self.limit)

    def _dense(self, batch: RequestBatch, request_N: Tensor) -> Tensor:
        user_NF = torch.from_numpy(batch.dense_user_RF)[request_N]
        return torch.cat([user_NF, torch.from_numpy(batch.dense_candidate_NF)], dim=1)[:, self._dense_order]
