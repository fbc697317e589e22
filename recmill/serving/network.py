"""The ranker's layers after the lookups, with what depends on the user alone computed once per request.

    dense values ── first layer: columns of the user once per request, of the candidate once per candidate, summed
    vectors      ── products of two of the user's vectors once per request, all others once per candidate
    top or cross ── first layers: inputs that are the user's once per request, as a bias; the rest per candidate

Linear layers take a sum apart: W [u, c] + b = (W_u u + b) + W_c c. So results equal those of the ranker but for the
order in which floats are added. With one candidate per request nothing is taken apart: `pair` of a network gets all
vectors of a candidate, in the ranker's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dot_interaction
from recmill.model.layers import MLP, CrossNetwork
from recmill.model.ranker import Ranker
from recmill.model.tasks import SharedBottom
from recmill.serving.batch import Ints

# R = requests, N = candidates, F = dense features, K = inputs of a layer, O = its outputs
# D = width of vectors, V = vectors of the user, C = vectors of a candidate, A = all of them
LOOP_CANDIDATES = 8  # with at least this many candidates per request, one product of matrices per request is faster


class Requests:
    """The number of candidates of each request."""

    def __init__(self, counts_R: Ints) -> None:
        self.counts_R = counts_R
        self.num_requests, self.num_candidates = len(counts_R), int(counts_R.sum())
        self.is_single = self.num_requests == 1
        # Every request has one candidate: nothing is shared, so nothing is worth computing apart.
        self.is_paired = self.num_requests == self.num_candidates and (self.is_single or int(counts_R.min()) == 1)

    @cached_property
    def request_N(self) -> Tensor:
        """The request of each candidate."""
        return torch.from_numpy(np.repeat(np.arange(self.num_requests), self.counts_R))

    def expand(self, rows: Tensor) -> Tensor:
        """[N, ...] from [R, ...]: each request's row for every candidate, as a copy."""
        return rows.index_select(0, self.request_N)

    def multiply(self, candidate_NCD: Tensor, user_RVD: Tensor) -> Tensor:
        """[N, C * V]: the products of every candidate's vectors with those of its user."""
        num_candidates, num_vectors, width = candidate_NCD.shape
        num_user = user_RVD.shape[1]
        if self.is_single:
            return (candidate_NCD.reshape(-1, width) @ user_RVD[0].t()).view(num_candidates, num_vectors * num_user)
        if num_candidates < LOOP_CANDIDATES * self.num_requests:
            return torch.bmm(candidate_NCD, self.expand(user_RVD).transpose(1, 2)).view(num_candidates, -1)
        found = candidate_NCD.new_empty(num_candidates * num_vectors, num_user)
        parts = [count * num_vectors for count in self.counts_R.tolist()]
        vectors = torch.split(candidate_NCD.reshape(-1, width), parts)
        for own, user_VD, out in zip(vectors, user_RVD, torch.split(found, parts), strict=True):
            torch.mm(own, user_VD.t(), out=out)
        return found.view(num_candidates, num_vectors * num_user)


class SplitLinear:
    """A linear layer over inputs of which some are the user's: [R, K of the user] and [N, K of the candidate]."""

    def __init__(self, layer: nn.Linear, user_columns: Sequence[int], candidate_columns: Sequence[int]) -> None:
        weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.user_OK = weight[:, list(user_columns)].contiguous()
        self.candidate_OK = weight[:, list(candidate_columns)].contiguous()

    def __call__(self, user_RK: Tensor, candidate_NK: Tensor, requests: Requests) -> Tensor:
        """[N, O]."""
        if not self.user_OK.shape[1]:
            return functional.linear(candidate_NK, self.candidate_OK, self.bias)
        user_RO = functional.linear(user_RK, self.user_OK, self.bias)
        if requests.is_single:  # the user's part is a bias
            return functional.linear(candidate_NK, self.candidate_OK, user_RO[0])
        if not self.candidate_OK.shape[1]:
            return requests.expand(user_RO)
        return requests.expand(user_RO).addmm_(candidate_NK, self.candidate_OK.t())


def apply_layers(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The layers of an MLP one after another; dropout does nothing here."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = functional.linear(x, layer.weight, layer.bias)
        elif isinstance(layer, nn.ReLU):
            x = torch.relu_(x)
        elif not isinstance(layer, nn.Dropout):
            x = layer(x)
    return x


class DenseBranch:
    """The bottom layers. The result is a vector of the user if all dense values are, else one of the candidate."""

    def __init__(self, bottom: MLP, *, user_columns: Sequence[int], candidate_columns: Sequence[int]) -> None:
        first, *self.rest = bottom
        assert isinstance(first, nn.Linear)
        self.is_user = not candidate_columns
        self.first = SplitLinear(first, user_columns, candidate_columns)
        self.joint_OF = torch.cat([self.first.user_OK, self.first.candidate_OK], dim=1)

    def __call__(self, user_RF: Tensor, candidate_NF: Tensor, requests: Requests) -> Tensor:
        if requests.is_paired:
            joint_NF = torch.cat([user_RF, candidate_NF], dim=1)
            return apply_layers(self.rest, functional.linear(joint_NF, self.joint_OF, self.first.bias))
        if self.is_user:
            first = functional.linear(user_RF, self.first.user_OK, self.first.bias)
        else:
            first = self.first(user_RF, candidate_NF, requests)
        return apply_layers(self.rest, first)


class ProductsNetwork:
    """DLRM after the lookups: products of all pairs of vectors, then the top layers."""

    def __init__(self, ranker: Ranker, *, is_user: Sequence[bool]) -> None:
        """`is_user` tells for every vector, in the ranker's order, whether it is the user's."""
        self.num_kept, self.width = ranker.num_kept, ranker.width
        order = sorted(range(len(is_user)), key=lambda vector: not is_user[vector])
        num_user = sum(is_user)
        self.num_kept_user = sum(is_user[: self.num_kept])
        self.num_kept_candidate = self.num_kept - self.num_kept_user
        pairs = {pair: n for n, pair in enumerate((f, g) for f in range(len(order)) for g in range(f))}
        start = self.num_kept * self.width

        def column(one: int, other: int) -> int:
            return start + pairs[max(one, other), min(one, other)]

        user, candidate = order[:num_user], order[num_user:]
        kept = [(v, list(range(v * self.width, (v + 1) * self.width))) for v in range(self.num_kept)]
        of_user = [c for v, columns in kept if is_user[v] for c in columns]
        of_candidate = [c for v, columns in kept if not is_user[v] for c in columns]
        of_user += [column(user[f], user[g]) for f in range(len(user)) for g in range(f)]
        of_candidate += [column(candidate[f], candidate[g]) for f in range(len(candidate)) for g in range(f)]
        of_candidate += [column(candidate[f], own) for f in range(len(candidate)) for own in user]
        self.head = Head(ranker.top, of_user, of_candidate)

    def __call__(self, user_RVD: Tensor, candidate_NCD: Tensor, requests: Requests) -> Tensor:
        user_RK = dot_interaction(user_RVD, num_kept=self.num_kept_user)
        candidate_NK = dot_interaction(candidate_NCD, num_kept=self.num_kept_candidate)
        if user_RVD.shape[1] and candidate_NCD.shape[1]:
            candidate_NK = torch.cat([candidate_NK, requests.multiply(candidate_NCD, user_RVD)], dim=1)
        return self.head(user_RK, candidate_NK, requests)

    def pair(self, vectors_NAD: Tensor) -> Tensor:
        return self.head.joint(dot_interaction(vectors_NAD, num_kept=self.num_kept))


class CrossesNetwork:
    """DCNv2 after the lookups: crosses and deep layers over all vectors side by side, then the top layers."""

    def __init__(self, ranker: Ranker, *, is_user: Sequence[bool]) -> None:
        columns = [list(range(v * ranker.width, (v + 1) * ranker.width)) for v in range(len(is_user))]
        of_user = [c for own, columns_ in zip(is_user, columns, strict=True) if own for c in columns_]
        of_candidate = [c for own, columns_ in zip(is_user, columns, strict=True) if not own for c in columns_]
        self.order = _inverse([*of_user, *of_candidate])
        self.ranker = ranker
        crosses, deep = ranker.interaction, ranker.deep
        assert isinstance(crosses, CrossNetwork)
        self.crosses, self.first_cross, self.deep, self.first_deep = list(crosses.layers), None, list(deep), None
        if self.crosses:
            own: Any = self.crosses[0]
            first, *rest = own if isinstance(own, nn.Sequential) else (own,)
            assert isinstance(first, nn.Linear)
            self.first_cross = (SplitLinear(first, of_user, of_candidate), rest)
        if self.deep:
            self.first_deep = SplitLinear(self.deep[0], of_user, of_candidate)  # type: ignore[arg-type]
        self.top = ranker.top

    def pair(self, vectors_NAD: Tensor) -> Tensor:
        flat_NK, ranker = vectors_NAD.flatten(1), self.ranker
        logits: Tensor = ranker.top(torch.cat([ranker.interaction(flat_NK), ranker.deep(flat_NK)], dim=1))
        return logits

    def __call__(self, user_RVD: Tensor, candidate_NCD: Tensor, requests: Requests) -> Tensor:
        user_RK, candidate_NK = user_RVD.flatten(1), candidate_NCD.flatten(1)
        start_NK = torch.cat([requests.expand(user_RK), candidate_NK], dim=1).index_select(1, self.order)
        crossed_NK = start_NK
        for number, layer in enumerate(self.crosses):
            if number == 0:
                first, rest = self.first_cross  # type: ignore[misc]
                weighed_NK = apply_layers(rest, first(user_RK, candidate_NK, requests))
            else:
                weighed_NK = layer(crossed_NK)
            crossed_NK = torch.addcmul(crossed_NK, start_NK, weighed_NK)
        deep_NK = start_NK
        if self.first_deep is not None:
            deep_NK = apply_layers(self.deep[1:], self.first_deep(user_RK, candidate_NK, requests))
        logits: Tensor = self.top(torch.cat([crossed_NK, deep_NK], dim=1))
        return logits


class Head:
    """The top layers over inputs of which some are the user's; heads that mix experts get all of them per candidate."""

    def __init__(self, top: nn.Module, of_user: Sequence[int], of_candidate: Sequence[int]) -> None:
        self.top, self.towers = top, []
        layers: Any = None
        if isinstance(top, MLP):
            layers = list(top)
        elif isinstance(top, SharedBottom) and isinstance(top.bottom, MLP) and len(top.bottom):
            layers, self.towers = list(top.bottom), list(top.towers)
        self.first = SplitLinear(layers[0], of_user, of_candidate) if layers else None
        self.layers = layers or []
        self.order = _inverse([*of_user, *of_candidate])

    def __call__(self, user_RK: Tensor, candidate_NK: Tensor, requests: Requests) -> Tensor:
        if self.first is None:
            joined_NK = torch.cat([requests.expand(user_RK), candidate_NK], dim=1).index_select(1, self.order)
            logits: Tensor = self.top(joined_NK)
            return logits
        return self._finish(apply_layers(self.layers[1:], self.first(user_RK, candidate_NK, requests)))

    def joint(self, joined_NK: Tensor) -> Tensor:
        """All inputs in the order of the top layers."""
        if self.first is None:
            logits: Tensor = self.top(joined_NK)
            return logits
        return self._finish(apply_layers(self.layers, joined_NK))

    def _finish(self, shared_NO: Tensor) -> Tensor:
        return torch.cat([tower(shared_NO) for tower in self.towers], dim=1) if self.towers else shared_NO


def _inverse(columns: Sequence[int]) -> Tensor:
    """Where each column is in the given order."""
    found = torch.empty(len(columns), dtype=torch.int64)
    found[torch.tensor(columns, dtype=torch.int64)] = torch.arange(len(columns))
    return found
