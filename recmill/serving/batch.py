"""Requests as arrays: what belongs to the user once per request, the rest once per candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.artifacts import InputError
from recmill.serving.signature import RequestFeature, Side, Signature

# R = requests, N = candidates of all requests, F = dense features of a side
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Lists = tuple[Ints, Ints]  # values, offsets: list i is values[offsets[i] : offsets[i + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestBatch:
    """Requests one after another; the candidates of a request are neighbours, in its order.

        counts_R      = [3, 2]
        user_ids      = {"history": ([7, 9], [0, 2, 2])}                        # one list per request
        candidate_ids = {"item": ([4, 5, 4, 8, 1], [0, 1, 2, 3, 4, 5])}         # one list per candidate

    Every feature of the signature is present, on its side. A list may be empty. `check` says what is wrong.
    """

    counts_R: Ints  # candidates per request
    dense_user_RF: Floats
    dense_candidate_NF: Floats
    user_ids: Mapping[str, Lists] = field(default_factory=dict)
    candidate_ids: Mapping[str, Lists] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.counts_R)

    @cached_property
    def num_candidates(self) -> int:
        return int(self.counts_R.sum())

    @classmethod
    def of_lists(
        cls,
        signature: Signature,
        counts: Sequence[int],
        *,
        user: Mapping[str, Any],
        candidate: Mapping[str, Any],
    ) -> RequestBatch:
        """From Python lists by feature: a number per dense feature, an id or a list of ids per other feature.

        `user` has one entry per request, `candidate` one per candidate. The batch is checked.
        """
        num_rows = {"user": len(counts), "candidate": int(sum(counts))}
        given: dict[Side, Mapping[str, Any]] = {"user": user, "candidate": candidate}
        for side, columns in given.items():
            _check_names(columns, signature, side)
        batch = cls(
            counts_R=np.asarray(counts, dtype=np.int64).reshape(-1),
            dense_user_RF=_dense_matrix(user, signature.dense_user, num_rows["user"]),
            dense_candidate_NF=_dense_matrix(candidate, signature.dense_candidate, num_rows["candidate"]),
            user_ids={f.name: _lists(user[f.name], f) for f in signature.of_side("user")},
            candidate_ids={f.name: _lists(candidate[f.name], f) for f in signature.of_side("candidate")},
        )
        batch.check(signature)
        return batch

    @classmethod
    def join(cls, batches: Sequence[RequestBatch]) -> RequestBatch:
        """The requests of several batches of one model as one batch, in their order."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            counts_R=np.concatenate([batch.counts_R for batch in batches]),
            dense_user_RF=np.concatenate([batch.dense_user_RF for batch in batches]),
            dense_candidate_NF=np.concatenate([batch.dense_candidate_NF for batch in batches]),
            user_ids=_join_lists([batch.user_ids for batch in batches]),
            candidate_ids=_join_lists([batch.candidate_ids for batch in batches]),
        )

    def check(self, signature: Signature, *, lists: bool = True) -> None:
        """Raise an InputError, of one sentence, unless a model with this signature can score the batch.

        `lists=False` leaves out what lists contain: the lookup of a model checks it again.
        """
        counts = self.counts_R
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise InputError("counts must be one whole number of at least 0 per request")
        _check_dense(self.dense_user_RF, (len(counts), len(signature.dense_user)), "user")
        num_candidates = self.num_candidates
        _check_dense(self.dense_candidate_NF, (num_candidates, len(signature.dense_candidate)), "candidate")
        sides: tuple[tuple[Side, Mapping[str, Lists], int], ...] = (
            ("user", self.user_ids, len(counts)),
            ("candidate", self.candidate_ids, num_candidates),
        )
        for side, given, num_lists in sides:
            wanted = signature.of_side(side)
            _check_present(given, signature.names_of_side(side), side)
            for feature in wanted if lists else ():
                _check_lists(given[feature.name], feature, num_lists)


def _check_names(columns: Mapping[str, Any], signature: Signature, side: Side) -> None:
    dense = signature.dense_user if side == "user" else signature.dense_candidate
    _check_present(columns, [*dense, *(feature.name for feature in signature.of_side(side))], side)


def _check_present(given: Mapping[str, Any], names: Sequence[str], side: Side) -> None:
    if given.keys() == set(names):
        return
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(f"feature {missing[0]!r} is missing, expected on the {side} side")
    extra = next(name for name in given if name not in names)
    raise InputError(f"feature {extra!r} is not one of the {side} side, expected {', '.join(names) or 'none'}")


def _dense_matrix(columns: Mapping[str, Any], names: Sequence[str], num_rows: int) -> Floats:
    found = np.empty((num_rows, len(names)), dtype=np.float32)
    for position, name in enumerate(names):
        try:
            values = np.asarray(columns[name], dtype=np.float32)
        except (TypeError, ValueError):
            raise InputError(f"feature {name!r}: expected numbers") from None
        if values.shape != (num_rows,):
            raise InputError(f"feature {name!r}: has shape {values.shape}, expected one number for each of {num_rows}")
        found[:, position] = values
    return found


def _lists(rows: Any, feature: RequestFeature) -> Lists:
    try:
        # A list of single ids, the most frequent case, needs no loop.
        plain = np.asarray(rows)
    except ValueError:  # lists of different lengths
        plain = None
    if plain is not None and plain.dtype.kind in "iu" and plain.ndim in (1, 2):
        width = 1 if plain.ndim == 1 else plain.shape[1]
        return plain.reshape(-1).astype(np.int64), np.arange(len(plain) + 1, dtype=np.int64) * width
    lists = [row if isinstance(row, list | tuple | np.ndarray) else [row] for row in rows]
    values = [value for row in lists for value in row]
    if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values):
        raise InputError(f"feature {feature.name!r}: ids must be whole numbers")
    try:
        ids = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise InputError(f"feature {feature.name!r}: ids must lie in [0, {feature.num_rows})") from None
    return ids, np.concatenate([[0], np.cumsum([len(row) for row in lists], dtype=np.int64)]).astype(np.int64)


def _join_lists(sides: Sequence[Mapping[str, Lists]]) -> dict[str, Lists]:
    found = {}
    for name in sides[0]:
        parts = [side[name] for side in sides]
        ends = np.cumsum([0, *(len(values) for values, _ in parts)])
        offsets = [own[1:] + end for (_, own), end in zip(parts, ends, strict=False)]
        found[name] = (np.concatenate([values for values, _ in parts]), np.concatenate([[0], *offsets]))
    return found


def _check_dense(values: Floats, shape: tuple[int, int], side: Side) -> None:
    if values.shape != shape:
        raise InputError(f"dense values of the {side} side have shape {values.shape}, expected {shape}")
    if not np.isfinite(values).all():
        raise InputError(f"dense values of the {side} side must be finite numbers")


def _check_lists(lists: Lists, feature: RequestFeature, num_lists: int) -> None:
    values, offsets = lists
    where = f"feature {feature.name!r}"
    if values.ndim != 1 or offsets.ndim != 1 or values.dtype != np.int64 or offsets.dtype != np.int64:
        raise InputError(f"{where}: values and offsets must be one-dimensional arrays of int64")
    if len(offsets) != num_lists + 1:
        raise InputError(f"{where}: {max(len(offsets) - 1, 0)} lists, expected {num_lists} on the {feature.side} side")
    if offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
        raise InputError(f"{where}: offsets must rise from 0 to the number of values, {len(values)}")
    # As unsigned numbers, negative ones are the largest.
    if len(values) and values.view(np.uint64).max() >= feature.num_rows:
        raise InputError(f"{where}: ids must lie in [0, {feature.num_rows})")
