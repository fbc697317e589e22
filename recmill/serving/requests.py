"""Which candidates belong to which request, and the two operations that need to know."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recmill.serving.batch import Ints

# R = requests, N = candidates, D = width of vectors, V = vectors of the user, C = vectors of a candidate
LOOP_CANDIDATES = 8  # with at least this many candidates per request, one product of matrices per request is faster


class Requests:
    """The number of candidates of each request."""

    def __init__(self, counts_R: Ints) -> None:
        self.counts_R = counts_R
        self.num_requests, self.num_candidates = len(counts_R), int(counts_R.sum())
        self.is_single = self.num_requests == 1

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
            return (candidate_NCD.view(-1, width) @ user_RVD[0].t()).view(num_candidates, num_vectors * num_user)
        if num_candidates < LOOP_CANDIDATES * self.num_requests:
            return torch.bmm(candidate_NCD, self.expand(user_RVD).transpose(1, 2)).view(num_candidates, -1)
        found = candidate_NCD.new_empty(num_candidates * num_vectors, num_user)
        parts = [count * num_vectors for count in self.counts_R.tolist()]
        vectors = torch.split(candidate_NCD.view(-1, width), parts)
        for own, user_VD, out in zip(vectors, user_RVD, torch.split(found, parts), strict=True):
            torch.mm(own, user_VD.t(), out=out)
        return found.view(num_candidates, num_vectors * num_user)
