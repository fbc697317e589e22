"""The ranker's layers after the lookups, with what depends on the user alone computed once per request.

    dense values ── first layer: columns of the user once per request, of the candidate once per candidate, summed
    vectors      ── products of two of the user's vectors once per request, all others once per candidate
    top or cross ── first layers: inputs that are the user's once per request, as a bias; the rest per candidate

Linear layers take a sum apart: W [u, c] + b = (W_u u + b) + W_c c. So results equal those of the ranker but for the
order in which floats are added. With one candidate per request nothing is taken apart: `pair` of a network gets all
vectors of a candidate, in the ranker's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernels import dot_interaction
from kernels.dense_layers import DenseLayers, dense_layers
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


Layer = tuple[Tensor, Tensor | None]  # weight [O, K] and bias


def linear_layers(modules: Iterable[nn.Module]) -> tuple[list[Layer], bool]:
    """Linear layers with ReLU between them, and whether there is one behind the last. Dropout does nothing here."""
    layers: list[Layer] = []
    has_relu = False
    for module in modules:
        if isinstance(module, nn.Linear):
            layers.append((module.weight.detach(), None if module.bias is None else module.bias.detach()))
            has_relu = False
        elif isinstance(module, nn.ReLU):
            has_relu = True
        else:
            assert isinstance(module, nn.Dropout)
    return layers, has_relu


class SplitLayers:
    """Linear layers over inputs of which some are the user's: [R, K of the user] and [N, K of the candidate]."""

    def __init__(
        self,
        layers: Sequence[Layer],
        user_columns: Sequence[int],
        candidate_columns: Sequence[int],
        *,
        ends_with_relu: bool = False,
        kernel: str | None = None,
    ) -> None:
        (weight, bias), *rest = layers
        self.kernel, self.is_split = kernel, bool(user_columns) and bool(candidate_columns)
        self.is_user = not candidate_columns
        user_OK, candidate_OK = weight[:, list(user_columns)], weight[:, list(candidate_columns)]
        self.user = DenseLayers([(user_OK, bias)]) if self.is_split else None
        own: Layer = (candidate_OK, None) if self.is_split else (user_OK if self.is_user else candidate_OK, bias)
        self.own = DenseLayers([own, *rest], ends_with_relu=ends_with_relu)
        self.joined = DenseLayers(layers, ends_with_relu=ends_with_relu)

    def __call__(self, user_RK: Tensor, candidate_NK: Tensor, requests: Requests) -> Tensor:
        """[N, O]."""
        if self.user is None:
            if not self.is_user:
                return dense_layers(self.own, candidate_NK, kernel=self.kernel)
            return requests.expand(dense_layers(self.own, user_RK, kernel=self.kernel))
        # The user's part is what the sums of the first layer start from.
        start_RO = dense_layers(self.user, user_RK, kernel=self.kernel)
        start_N = None if requests.is_single else requests.request_N
        return dense_layers(self.own, candidate_NK, start_RO=start_RO, start_N=start_N, kernel=self.kernel)

    def join(self, joined_NK: Tensor) -> Tensor:
        """The same of all inputs, in the order of the layers."""
        return dense_layers(self.joined, joined_NK, kernel=self.kernel)


class DenseBranch:
    """The bottom layers. The result is a vector of the user if all dense values are, else one of the candidate."""

    def __init__(
        self, bottom: MLP, *, user_columns: Sequence[int], candidate_columns: Sequence[int], kernel: str | None = None
    ) -> None:
        self.is_user = not candidate_columns
        ((weight, bias), *rest), ends_with_relu = linear_layers(bottom)
        # In the order of a request: the user's before the candidate's.
        layers = [(weight[:, [*user_columns, *candidate_columns]], bias), *rest]
        num_user, num_all = len(user_columns), weight.shape[1]
        self.layers = SplitLayers(
            layers, range(num_user), range(num_user, num_all), ends_with_relu=ends_with_relu, kernel=kernel
        )

    def __call__(self, user_RF: Tensor, candidate_NF: Tensor, requests: Requests) -> Tensor:
        if self.is_user:
            return self.layers.join(user_RF)
        if requests.is_paired and self.layers.is_split:
            return self.layers.join(torch.cat([user_RF, candidate_NF], dim=1))
        return self.layers(user_RF, candidate_NF, requests)


class ProductsNetwork:
    """DLRM after the lookups: products of all pairs of vectors, then the top layers."""

    def __init__(self, ranker: Ranker, *, is_user: Sequence[bool], kernel: str | None = None) -> None:
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
        self.head = Head(ranker.top, of_user, of_candidate, kernel)

    def __call__(self, user_RVD: Tensor, candidate_NCD: Tensor, requests: Requests) -> Tensor:
        user_RK = dot_interaction(user_RVD, num_kept=self.num_kept_user)
        candidate_NK = dot_interaction(candidate_NCD, num_kept=self.num_kept_candidate)
        if user_RVD.shape[1] and candidate_NCD.shape[1]:
            candidate_NK = torch.cat([candidate_NK, requests.multiply(candidate_NCD, user_RVD)], dim=1)
        return self.head(user_RK, candidate_NK, requests)

    def pair(self, vectors_NAD: Tensor) -> Tensor:
        return self.head.join(dot_interaction(vectors_NAD, num_kept=self.num_kept))


class CrossesNetwork:
    """DCNv2 after the lookups: crosses and deep layers over all vectors side by side, then the top layers."""

    def __init__(self, ranker: Ranker, *, is_user: Sequence[bool], kernel: str | None = None) -> None:
        columns = [list(range(v * ranker.width, (v + 1) * ranker.width)) for v in range(len(is_user))]
        of_user = [c for own, columns_ in zip(is_user, columns, strict=True) if own for c in columns_]
        of_candidate = [c for own, columns_ in zip(is_user, columns, strict=True) if not own for c in columns_]
        self.order = _inverse([*of_user, *of_candidate])
        self.ranker, self.top = ranker, ranker.top
        assert isinstance(ranker.interaction, CrossNetwork)
        self.crosses, self.first_cross, self.deep = list(ranker.interaction.layers), None, None
        if self.crosses:
            own: Any = self.crosses[0]
            first, *rest = own if isinstance(own, nn.Sequential) else (own,)
            self.first_cross = SplitLayers(linear_layers([first])[0], of_user, of_candidate, kernel=kernel), rest
        if len(ranker.deep):
            layers, ends_with_relu = linear_layers(ranker.deep)
            self.deep = SplitLayers(layers, of_user, of_candidate, ends_with_relu=ends_with_relu, kernel=kernel)

    def pair(self, vectors_NAD: Tensor) -> Tensor:
        flat_NK = vectors_NAD.flatten(1)
        deep_NK = flat_NK if self.deep is None else self.deep.join(flat_NK)
        logits: Tensor = self.top(torch.cat([self.ranker.interaction(flat_NK), deep_NK], dim=1))
        return logits

    def __call__(self, user_RVD: Tensor, candidate_NCD: Tensor, requests: Requests) -> Tensor:
        user_RK, candidate_NK = user_RVD.flatten(1), candidate_NCD.flatten(1)
        start_NK = torch.cat([requests.expand(user_RK), candidate_NK], dim=1).index_select(1, self.order)
        crossed_NK = start_NK
        for number, layer in enumerate(self.crosses):
            if number == 0:
                first, rest = self.first_cross  # type: ignore[misc]
                weighed_NK = first(user_RK, candidate_NK, requests)
                for own in rest:
                    weighed_NK = own(weighed_NK)
            else:
                weighed_NK = layer(crossed_NK)
            crossed_NK = torch.addcmul(crossed_NK, start_NK, weighed_NK)
        deep_NK = start_NK if self.deep is None else self.deep(user_RK, candidate_NK, requests)
        logits: Tensor = self.top(torch.cat([crossed_NK, deep_NK], dim=1))
        return logits


class Head:
    """The top layers over inputs of which some are the user's; heads that mix experts get all of them per candidate."""

    def __init__(
        self, top: nn.Module, of_user: Sequence[int], of_candidate: Sequence[int], kernel: str | None = None
    ) -> None:
        self.top, self.order = top, _inverse([*of_user, *of_candidate])
        self.layers: SplitLayers | None = None
        self.towers: list[nn.Module] = []
        own: Any = top
        if isinstance(top, SharedBottom) and isinstance(top.bottom, MLP) and len(top.bottom):
            own, self.towers = top.bottom, list(top.towers)
        if isinstance(own, MLP):
            layers, ends_with_relu = linear_layers(own)
            self.layers = SplitLayers(layers, of_user, of_candidate, ends_with_relu=ends_with_relu, kernel=kernel)

    def __call__(self, user_RK: Tensor, candidate_NK: Tensor, requests: Requests) -> Tensor:
        if self.layers is None:
            joined_NK = torch.cat([requests.expand(user_RK), candidate_NK], dim=1).index_select(1, self.order)
            logits: Tensor = self.top(joined_NK)
            return logits
        return self._finish(self.layers(user_RK, candidate_NK, requests))

    def join(self, joined_NK: Tensor) -> Tensor:
        """All inputs in the order of the top layers."""
        if self.layers is None:
            logits: Tensor = self.top(joined_NK)
            return logits
        return self._finish(self.layers.join(joined_NK))

    def _finish(self, shared_NO: Tensor) -> Tensor:
        return torch.cat([tower(shared_NO) for tower in self.towers], dim=1) if self.towers else shared_NO


def _inverse(columns: Sequence[int]) -> Tensor:
    """Where each column is in the given order."""
    found = torch.empty(len(columns), dtype=torch.int64)
    found[torch.tensor(columns, dtype=torch.int64)] = torch.arange(len(columns))
    return found
