"""Short codes for popular ids: the k-th most popular id of a table is stored as k, other ids as themselves + K.

Ids say nothing of popularity, so the bytes of an id are close to random however frequent it is. Codes of popular ids
are small numbers: their high bytes are mostly 0, their low bytes mostly small, and byte-stream-split with zstd can use
that. Lists of Zipf-distributed ids out of 100,000 shrink from 16.8 to 12.2 bits an id, where the entropy is 10.6.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IdArray = npt.NDArray[np.int64]
METADATA_KEY = b"recmill.popular_ids"  # in the footer of every part
SIZES = (256, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
# Of two dictionaries, the bigger one must earn this for each id it adds: about what a block of sorted ids takes.
BITS_AN_ID = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class PopularIds:
    """The popular ids of one table, most popular first in blocks (see SIZES); inside a block they are sorted."""

    ids: IdArray

    @classmethod
    def choose(cls, ids: IdArray, *, num_stored: float) -> Self | None:
        """Those of a sample of `ids` that save most when `num_stored` ids will be stored; None if nothing is saved.

        Popularity is taken from one half of the sample and judged by the other: what is popular by chance does not
        pay. Counting the whole log instead takes another pass over it and 0.7% off the files of `recd`.
        """
        half = len(ids) // 2
        ranked = _by_popularity(ids[:half])
        costs: dict[int, float] = {0: num_stored * byte_entropy(ids[half:])}
        for size in {min(size, len(ranked)) for size in SIZES} - {0}:
            codes = cls(ids=_in_blocks(ranked[:size])).to_codes(ids[half:])
            costs[size] = num_stored * byte_entropy(codes) + BITS_AN_ID * size
        best = min(costs, key=lambda size: costs[size])
        return cls(ids=_in_blocks(_by_popularity(ids)[:best])) if costs[best] < 0.97 * costs[0] else None

    @cached_property
    def _by_id(self) -> tuple[IdArray, IdArray]:
        order = np.argsort(self.ids)
        return self.ids[order], order

    def to_codes(self, ids: IdArray) -> IdArray:
        known, codes = self._by_id
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[at] == ids, codes[at], ids + len(known))

    def to_ids(self, codes: npt.NDArray[np.integer]) -> IdArray:
        others = np.subtract(codes, len(self.ids), dtype=np.int64)
        # Looking up the others too (clipped) and dropping that is 8 times as fast as picking out the popular ones.
        return np.where(others < 0, self.ids.take(codes, mode="clip"), others)


def _by_popularity(ids: IdArray) -> IdArray:
    """The ids that occur more than once, most frequent first."""
    seen, counts = np.unique(ids, return_counts=True)
    return seen[np.argsort(-counts, kind="stable")][: int((counts > 1).sum())]


def _in_blocks(ranked: IdArray) -> IdArray:
    """Ids sorted inside blocks of similar popularity: their differences take half the bytes of the ids."""
    edges = [0, *(size for size in SIZES if size < len(ranked)), len(ranked)]
    return np.concatenate([np.sort(ranked[start:stop]) for start, stop in pairwise(edges)])


def byte_entropy(values: IdArray) -> float:
    """Bits a value when each of its bytes is coded on its own, as byte-stream-split and zstd do."""
    bits = 0.0
    for position in range(8):
        counts = np.bincount((values >> (8 * position)) & 255, minlength=256)
        shares = counts[counts > 0] / max(len(values), 1)
        bits -= float((shares * np.log2(shares)).sum())
    return bits


def dump_popular_ids(popular: Mapping[str, PopularIds]) -> dict[bytes, bytes]:
    """Metadata for the footer of a part."""
    if not popular:
        return {}
    codec = pa.Codec("zstd", compression_level=19)
    entries = {}
    for table, own in popular.items():
        steps = np.diff(own.ids, prepend=0)
        split = np.ascontiguousarray(steps.astype("<i8").view(np.uint8).reshape(-1, 8).T)
        packed = codec.compress(split.tobytes(), asbytes=True)
        entries[table] = {"num_ids": len(own.ids), "steps": base64.b85encode(packed).decode()}
    return {METADATA_KEY: json.dumps(entries).encode()}


def load_popular_ids(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, PopularIds]:
    """The popular ids a part was written with, by table."""
    return _load((metadata or {}).get(METADATA_KEY, b"{}"))


@lru_cache(maxsize=64)  # every row group of a part brings the same footer
def _load(text: bytes) -> Mapping[str, PopularIds]:
    popular = {}
    for table, entry in json.loads(text).items():
        num_ids = entry["num_ids"]
        packed = base64.b85decode(entry["steps"])
        split = pa.Codec("zstd").decompress(packed, decompressed_size=8 * num_ids, asbytes=True)
        steps = np.ascontiguousarray(np.frombuffer(split, np.uint8).reshape(8, num_ids).T).view("<i8").reshape(-1)
        popular[table] = PopularIds(ids=np.cumsum(steps, dtype=np.int64))
    return popular
