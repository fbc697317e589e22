"""Scores requests: the user's features are looked up, pooled and encoded once per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels import _cpu
from recmill.artifacts import module_name
from recmill.data.schema import Feature, Schema
from recmill.model.encoders import SequenceWindows, TargetAttentionEncoder, fold_encoder
from recmill.model.ranker import Ranker
from recmill.serving.batch import Ints, Lists, RequestBatch
from recmill.serving.lookups import FeaturePath, Found, SlotLookup
from recmill.serving.network import CrossesNetwork, DenseBranch, ProductsNetwork, Requests
from recmill.serving.signature import Signature
from recmill.serving.tables import ServedTable, pool_lists

# R = requests, N = candidates, F = dense features, D = embedding width
DENSE = ""  # stands for the dense values among the names of vectors


class RequestScorer:
    """Logits [N, labels] of the candidates of a batch of requests.

    `is_split=False` encodes users once per request but computes all that follows per candidate, with the ranker itself.
    `is_fused=False` looks up feature after feature, encodes as training does and has torch multiply.
    """

    def __init__(
        self,
        ranker: Ranker,
        tables: Mapping[str, ServedTable],
        *,
        signature: Signature,
        limit: int,
        is_split: bool = True,
        is_fused: bool = True,
    ) -> None:
        self.ranker, self.tables, self.signature, self.limit = ranker.eval(), tables, signature, limit
        self.schema: Schema = ranker.schema
        self.is_split, self.is_fused = is_split, is_fused
        # Without AVX2, torch multiplies faster than the compiled encoders and layers.
        self.is_compiled = is_fused and _cpu.has_fma()
        self.user_names = frozenset(feature.name for feature in signature.of_side("user"))
        self.features = [self._describe(feature) for feature in self.schema.id_features]
        position = {name: n for n, name in enumerate((*signature.dense_user, *signature.dense_candidate))}
        self._dense_order = [position[feature.name] for feature in self.schema.dense]
        names = [feature.name for feature in self.schema.dense]
        of_user = [names.index(name) for name in signature.dense_user]
        of_candidate = [names.index(name) for name in signature.dense_candidate]
        kernel = None if self.is_compiled else "reference"  # of dense layers
        self.bottom: DenseBranch | None = None
        is_user = {own.name: own.is_user_vector for own in self.features}
        if ranker.bottom is not None:
            self.bottom = DenseBranch(
                ranker.bottom, user_columns=of_user, candidate_columns=of_candidate, kernel=kernel
            )
            is_user = {DENSE: self.bottom.is_user, **is_user}
        network = ProductsNetwork if ranker.is_dlrm else CrossesNetwork
        self.network = network(ranker, is_user=list(is_user.values()), kernel=kernel)
        of_users = [name for name, own in is_user.items() if own]
        of_candidates = [name for name, own in is_user.items() if not own]
        self._user = self._lookup([own for own in self.features if own.is_user], of_users)
        self._candidate = self._lookup([own for own in self.features if not own.is_user], of_candidates)
        self._pair = self._lookup(self.features, list(is_user))
        # Whether the lookup refuses lists that are not as the tables need them; else the caller must.
        self.checks_lists = is_split and not self._pair.apart

    def __call__(self, batch: RequestBatch) -> Tensor:
        """ValueError if lists are not as the tables need them."""
        requests = Requests(batch.counts_R)
        if not self.is_split:
            return self._rank(batch, requests)
        if requests.is_paired:
            ids = {**batch.user_ids, **batch.candidate_ids}
            both = self._pair(ids, requests.num_requests)
            self._fill(batch, requests, both, both)
            return self.network.pair(both.vectors_NVD)
        user = self._user(batch.user_ids, requests.num_requests)
        candidate = self._candidate(batch.candidate_ids, requests.num_candidates)
        self._fill(batch, requests, user, candidate)
        return self.network(user.vectors_NVD, candidate.vectors_NVD, requests)

    def _describe(self, feature: Feature) -> FeaturePath:
        name, target = module_name(feature.name), self.ranker.targets.get(feature.name, "")
        encoder: Any = self.ranker.encoders[name] if feature.kind == "sequence" else None
        if encoder is not None and self.is_fused and self.is_split:
            encoder = fold_encoder(encoder, is_compiled=self.is_compiled)
        is_user = feature.name in self.user_names
        return FeaturePath(
            name=feature.name,
            table=self.tables[feature.table],
            is_mean=feature.pooling == "mean",
            is_user=is_user,
            is_user_vector=is_user and (not target or target in self.user_names),
            encoder=encoder,
            projection=self.ranker.projections[name] if name in self.ranker.projections else None,  # noqa: SIM401
            target=target,
        )

    def _lookup(self, features: list[FeaturePath], vectors: list[str]) -> SlotLookup:
        return SlotLookup(
            features,
            {name: slot for slot, name in enumerate(vectors)},
            num_slots=len(vectors),
            width=self.ranker.width,
            limit=self.limit,
            targets=frozenset(self.ranker.targets.values()),
            is_fused=self.is_fused,
        )

    def _fill(self, batch: RequestBatch, requests: Requests, user: Found, candidate: Found) -> None:
        """The slots of dense values and of sequences that are not plain sums or means."""
        is_paired = requests.is_paired
        if self.bottom is not None:
            dense = (torch.from_numpy(batch.dense_user_RF), torch.from_numpy(batch.dense_candidate_NF))
            # The dense vector is the first of its side.
            (user if self.bottom.is_user else candidate).vectors_NVD[:, 0] = self.bottom(*dense, requests)
        for own in self.features:
            given = user if own.is_user else candidate
            if own.name not in given.rows:
                continue
            lists = (batch.user_ids if own.is_user else batch.candidate_ids)[own.name]
            vector = self._encode(own, lists, user, candidate, requests)
            if own.projection is not None:
                vector = functional.linear(vector, own.projection.weight)
            to, lookup = (user, self._user) if own.is_user_vector else (candidate, self._candidate)
            to.vectors_NVD[:, (self._pair if is_paired else lookup).slots[own.name]] = vector

    def _encode(self, own: FeaturePath, lists: Lists, user: Found, candidate: Found, requests: Requests) -> Tensor:
        windows = self._windows((user if own.is_user else candidate).rows[own.name], lists[1])
        if not isinstance(own.encoder, TargetAttentionEncoder):
            found: Tensor = own.encoder.encode(windows)
            return found
        is_target_user = own.target in self.user_names
        target = (user if is_target_user else candidate).pooled[own.target]
        if own.is_user_vector or requests.is_paired:
            return own.encoder.encode(windows, target, None)
        target_ND = requests.expand(target) if is_target_user else target
        return own.encoder.encode(windows, target_ND, requests.request_N if own.is_user else None)

    def _windows(self, rows_ND: Tensor, offsets: Ints) -> SequenceWindows:
        """The last `limit` rows of every list."""
        lengths_U = offsets[1:] - offsets[:-1]
        is_packed = not lengths_U.max(initial=0) > self.limit
        if not is_packed:
            lengths_U = np.minimum(lengths_U, self.limit)
        starts_U = offsets[1:] - lengths_U
        return SequenceWindows(
            rows_ND=rows_ND,
            starts_U=torch.from_numpy(starts_U),
            lengths_U=torch.from_numpy(lengths_U),
            is_packed=is_packed,
        )

    def _rank(self, batch: RequestBatch, requests: Requests) -> Tensor:
        """With the ranker itself, which expands users after their encoders."""
        pooled: dict[str, Tensor] = {}
        sequences: dict[str, SequenceWindows] = {}
        for own in self.features:
            values, offsets = (batch.user_ids if own.is_user else batch.candidate_ids)[own.name]
            if own.encoder is None:
                pooled[own.name] = pool_lists(own.table, values, offsets, is_mean=own.is_mean)
            else:
                sequences[own.name] = self._windows(own.table.rows(torch.from_numpy(values)), offsets)
        inverse = dict.fromkeys(self.user_names, requests.request_N)
        logits: Tensor = self.ranker(self._dense(batch, requests), pooled, sequences, inverse)
        return logits if logits.dim() == 2 else logits[:, None]

    def _dense(self, batch: RequestBatch, requests: Requests) -> Tensor:
        user_NF = requests.expand(torch.from_numpy(batch.dense_user_RF))
        return torch.cat([user_NF, torch.from_numpy(batch.dense_candidate_NF)], dim=1)[:, self._dense_order]
