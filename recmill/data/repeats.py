"""Whether lists of ids repeat enough to pay: in a batch, and in the layout of the stored data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import dedup_rows
from recmill.artifacts.dataset import Layout
from recmill.data.schema import Schema

MIN_FACTOR = 1.5  # samples per distinct list; below it, expanding costs more than the lookup saves
MIN_MEAN_LENGTH = 3.0  # looking up a shorter bag costs no more than copying its vector

# Features share an inverse if storing them together adds at most this share of distinct rows to either.
GROUP_TOLERANCE = 0.05
IntArray = npt.NDArray[np.int64]

# Odd, so that multiplying by them loses no bit.
MIX_VALUE, MIX_PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def pays(factor: float, mean_length: float, *, is_sequence: bool) -> bool:
    """Whether training each distinct list of a feature once is faster."""
    return factor >= MIN_FACTOR and (is_sequence or mean_length >= MIN_MEAN_LENGTH)


@dataclass(frozen=True, kw_only=True)
class SessionRepeats:
    """How the lists of one feature repeat inside sessions."""

    factor: float  # samples per distinct list of a session
    mean_length: float
    is_sequence: bool

    @property
    def pays(self) -> bool:
        return pays(self.factor, self.mean_length, is_sequence=self.is_sequence)


def layout_for(features: Mapping[str, SessionRepeats], samples_per_session: float) -> tuple[Layout, str]:
    """The layout to store a log in, and why."""
    size, worth = samples_per_session, {name: own for name, own in features.items() if own.pays}
    if worth:
        best = max(own.factor for own in worth.values())
        named = next(iter(worth)) if len(worth) == 1 else f"{len(worth)} of {len(features)} features"
        return "deduplicated", (
            f"{named} repeat inside sessions of {size:.1f} samples, up to {best:.1f} times: store and train each "
            "distinct list once"
        )
    if size > 1.0:
        return "session", (
            f"lists hardly repeat inside sessions of {size:.1f} samples: storing sessions together compresses better, "
            "and there is nothing to deduplicate"
        )
    return "time", "sessions have one sample each, so no order stores or trains better than time order"


def count_repeats(rows: pa.Table, schema: Schema) -> tuple[dict[str, SessionRepeats], float]:
    """How every feature with ids repeats in whole sessions, sorted by session; and samples per session.

    Lists are compared by a hash of 64 bits: an estimate for choosing a layout, exact but for collisions.
    """
    _, session_R = np.unique(rows.column("session_id").to_numpy(), return_inverse=True)
    num_rows, num_sessions = len(session_R), int(session_R.max()) + 1 if len(session_R) else 0
    found = {}
    for feature in schema.id_features:
        lists = rows.column(feature.name).combine_chunks()
        values, offsets = lists.flatten().to_numpy(), np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())])
        num_distinct = len(np.unique(np.stack([session_R, hash_lists(values, offsets)], axis=1), axis=0))
        found[feature.name] = SessionRepeats(
            factor=num_rows / max(num_distinct, 1),
            mean_length=len(values) / max(num_rows, 1),
            is_sequence=feature.kind == "sequence",
        )
    return found, num_rows / max(num_sessions, 1)


def hash_lists(values: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A hash per list of its values and their order; list r is values[offsets[r] : offsets[r + 1]]."""
    lengths = np.diff(offsets)
    place = (np.arange(len(values)) - np.repeat(offsets[:-1], lengths)).astype(np.uint64)
    mixed = (values.astype(np.uint64) + MIX_PLACE * (place + np.uint64(1))) * MIX_VALUE
    mixed = (mixed ^ (mixed >> np.uint64(29))) * MIX_PLACE
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64)])
    hashed = sums[offsets[1:]] - sums[offsets[:-1]] + lengths.astype(np.uint64) * MIX_VALUE
    return np.asarray(hashed.view(np.int64))


def join_alike(features: Iterable[tuple[str, IntArray, IntArray]]) -> list[tuple[list[str], IntArray, IntArray]]:
    """Features that change together, with what `dedup_rows` found: (name, distinct rows, inverse) of each, as groups.

    A feature joins the first group if combining the two adds hardly any distinct rows to either.
    """
    groups: list[tuple[list[str], IntArray, IntArray]] = []
    for name, unique_U, inverse_R in features:
        for position, (names, group_U, group_R) in enumerate(groups):
            most = (1 + GROUP_TOLERANCE) * min(len(unique_U), len(group_U))
            if max(len(unique_U), len(group_U)) > most:
                continue
            each: IntArray = np.arange(len(inverse_R) + 1)
            both_U, both_R = dedup_rows([group_R, inverse_R], [each, each], num_threads=1)
            if len(both_U) <= most:
                groups[position] = ([*names, name], both_U, both_R)
                break
        else:
            groups.append(([name], unique_U, inverse_R))
    return groups
