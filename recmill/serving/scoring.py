"""Scores requests: the user's features are looked up, pooled and encoded once per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recmill.artifacts import module_name
from recmill.data.schema import Feature, Schema
from recmill.model.encoders import SequenceWindows, TargetAttentionEncoder
from recmill.model.ranker import Ranker
from recmill.serving.batch import Ints, RequestBatch
from recmill.serving.network import CrossesNetwork, DenseBranch, ProductsNetwork
from recmill.serving.requests import Requests
from recmill.serving.signature import Signature
from recmill.serving.tables import ServedTable, pool_lists

# R = requests, N = candidates, F = dense features, D = embedding width


@dataclass(frozen=True, kw_only=True, eq=False)
class FeaturePath:
    """How a feature with ids becomes a vector."""

    name: str
    table: ServedTable
    is_mean: bool
    is_user: bool  # the caller gives it once per request
    is_user_vector: bool  # and its vector is the same for all candidates: a history weighed for a target is not
    encoder: Any  # of a sequence, else None
    projection: Any  # to the width of all vectors, if the table has another
    target: str  # the feature that a sequence is weighed for, or ""


class RequestScorer:
    """Logits [N, labels] of the candidates of a batch of requests.

    `is_split=False` encodes users once per request but computes all that follows per candidate, with the ranker itself.
    """

    def __init__(
        self,
        ranker: Ranker,
        tables: Mapping[str, ServedTable],
        *,
        signature: Signature,
        limit: int,
        is_split: bool = True,
    ) -> None:
        self.ranker, self.tables, self.signature, self.limit = ranker.eval(), tables, signature, limit
        self.schema: Schema = ranker.schema
        self.is_split = is_split
        self.user_names = frozenset(feature.name for feature in signature.of_side("user"))
        self.features = [self._describe(feature) for feature in self.schema.id_features]
        position = {name: n for n, name in enumerate((*signature.dense_user, *signature.dense_candidate))}
        self._dense_order = [position[feature.name] for feature in self.schema.dense]
        names = [feature.name for feature in self.schema.dense]
        of_user = [names.index(name) for name in signature.dense_user]
        of_candidate = [names.index(name) for name in signature.dense_candidate]
        self.bottom: DenseBranch | None = None
        is_user = [own.is_user_vector for own in self.features]
        if ranker.bottom is not None:
            self.bottom = DenseBranch(ranker.bottom, user_columns=of_user, candidate_columns=of_candidate)
            is_user = [self.bottom.is_user, *is_user]
        self.network = (ProductsNetwork if ranker.is_dlrm else CrossesNetwork)(ranker, is_user=is_user)

    def __call__(self, batch: RequestBatch) -> Tensor:
        requests = Requests(batch.counts_R)
        pooled, sequences = self._look_up(batch)
        if not self.is_split:
            inverse = dict.fromkeys(self.user_names, requests.request_N)
            logits: Tensor = self.ranker(self._dense(batch, requests), pooled, sequences, inverse)
            return logits if logits.dim() == 2 else logits[:, None]
        user: list[Tensor] = []
        candidate: list[Tensor] = []
        if self.bottom is not None:
            dense = (torch.from_numpy(batch.dense_user_RF), torch.from_numpy(batch.dense_candidate_NF))
            (user if self.bottom.is_user else candidate).append(self.bottom(*dense, requests))
        for own in self.features:
            vector = pooled[own.name] if own.encoder is None else self._encode(own, pooled, sequences, requests)
            if own.projection is not None:
                vector = functional.linear(vector, own.projection.weight)
            (user if own.is_user_vector else candidate).append(vector)
        return self.network(user, candidate, requests)

    def _describe(self, feature: Feature) -> FeaturePath:
        name, target = module_name(feature.name), self.ranker.targets.get(feature.name, "")
        is_user = feature.name in self.user_names
        return FeaturePath(
            name=feature.name,
            table=self.tables[feature.table],
            is_mean=feature.pooling == "mean",
            is_user=is_user,
            is_user_vector=is_user and (not target or target in self.user_names),
            encoder=self.ranker.encoders[name] if feature.kind == "sequence" else None,
            projection=self.ranker.projections[name] if name in self.ranker.projections else None,  # noqa: SIM401
            target=target,
        )

    def _look_up(self, batch: RequestBatch) -> tuple[dict[str, Tensor], dict[str, SequenceWindows]]:
        """Per request or per candidate: the vector of every sparse feature, and the rows of every sequence."""
        pooled: dict[str, Tensor] = {}
        sequences: dict[str, SequenceWindows] = {}
        for own in self.features:
            values, offsets = (batch.user_ids if own.is_user else batch.candidate_ids)[own.name]
            if own.encoder is None:
                pooled[own.name] = pool_lists(own.table, values, offsets, is_mean=own.is_mean)
            else:
                sequences[own.name] = self._windows(own.table, values, offsets)
        return pooled, sequences

    def _encode(
        self,
        own: FeaturePath,
        pooled: Mapping[str, Tensor],
        sequences: Mapping[str, SequenceWindows],
        requests: Requests,
    ) -> Tensor:
        windows = sequences[own.name]
        if not isinstance(own.encoder, TargetAttentionEncoder):
            found: Tensor = own.encoder.encode(windows)
            return found
        is_target_user = own.target in self.user_names
        if own.is_user_vector:
            return own.encoder.encode(windows, pooled[own.target], None)
        target_ND = requests.expand(pooled[own.target]) if is_target_user else pooled[own.target]
        return own.encoder.encode(windows, target_ND, requests.request_N if own.is_user else None)

    def _windows(self, table: ServedTable, values: Ints, offsets: Ints) -> SequenceWindows:
        rows_ND = table.rows(torch.from_numpy(values))
        return SequenceWindows.of_lists(rows_ND, torch.from_numpy(offsets[1:] - offsets[:-1]), max_length=self.limit)

    def _dense(self, batch: RequestBatch, requests: Requests) -> Tensor:
        user_NF = requests.expand(torch.from_numpy(batch.dense_user_RF))
        return torch.cat([user_NF, torch.from_numpy(batch.dense_candidate_NF)], dim=1)[:, self._dense_order]
