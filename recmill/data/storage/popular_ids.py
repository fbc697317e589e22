"""Ids as a symbol of one byte and, for most, one to three more bytes: popular ids are short, and symbols compress.

An id does not show how popular it is, so its bytes look random even if it is frequent. Here

    symbol 0 .. D-1          one of the D most popular ids, each with a symbol of its own
    symbol D .. D+B-1        a block of 256 ids of similar popularity; the next byte says which one
    symbol D+B .. 255        any other id: the symbol holds its highest bits, the next bytes the others

The symbols form one stream and the bytes that follow them another. zstd codes symbols by their frequency, which is
nearly all there is to know about an id drawn from a Zipf law: lists of ids out of 100,000 take 11.0 bits per id where
their entropy is 10.3; the same ids as byte-stream-split numbers take 16.8.

Measured gain (benchmarks/codecs.py): recd 97 bytes per row instead of 126, read at 0.88 times the speed; globo, whose
clicks are mostly histories in the footer, 5.07 bytes per row instead of 5.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from kernels import decode_symbols
from recmill.data.storage.footer_text import TextKey, pack_numbers, unpack_numbers

IdArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
METADATA_PREFIX = b"recmill.popular_ids/"  # in the footer of every part, with the name of a table
SIZES = (0, 128, 240, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
BLOCK = 256
MAX_ESCAPES = 16
# A larger dictionary must save this many bits per id that it adds: about what an id takes in a block of sorted ids.
BITS_AN_ID = 11


@dataclass(frozen=True, kw_only=True, eq=False)
class PopularIds:
    """The popular ids of a table of `num_rows` rows: those with their own symbol, then block by block, each sorted."""

    ids: IdArray
    num_rows: int

    @classmethod
    def choose(cls, ids: IdArray, *, num_rows: int, num_stored: float) -> Self | None:
        """The ids of a sample that save most when `num_stored` ids will be stored; None if nothing is saved.

        One half of the sample ranks the ids and the other half judges them, so that ids that are popular by chance do
        not count. Counting the whole log needs another pass over it and makes the files of `recd` 0.7% smaller.
        """
        half = len(ids) // 2
        ranked = _by_popularity(ids[:half])
        costs: dict[int, float] = {}
        for size in {min(size, len(ranked)) for size in SIZES}:
            symbols, rest = cls.of_ranked(ranked[:size], num_rows).to_symbols(ids[half:])
            bits = byte_entropy(symbols) + 8 * len(rest) / max(len(symbols), 1)
            costs[size] = num_stored * bits + BITS_AN_ID * size
        best = min(costs, key=lambda size: costs[size])
        if costs[best] >= 0.97 * num_stored * byte_entropy(ids[half:]):
            return None
        return cls.of_ranked(_by_popularity(ids)[:best], num_rows)

    @classmethod
    def of_ranked(cls, ranked: IdArray, num_rows: int) -> Self:
        """From ids in order of popularity, the most popular first."""
        num_direct = _count_direct(len(ranked), num_rows)
        edges = [0, *range(num_direct, len(ranked), BLOCK), len(ranked)]
        blocks = [np.sort(ranked[start:stop]) for start, stop in pairwise(edges)]
        return cls(ids=np.concatenate([np.zeros(0, np.int64), *blocks]), num_rows=num_rows)

    @cached_property
    def num_direct(self) -> int:
        return _count_direct(len(self.ids), self.num_rows)

    @cached_property
    def _first_escape(self) -> int:
        return self.num_direct + -(-(len(self.ids) - self.num_direct) // BLOCK)

    @cached_property
    def _by_id(self) -> tuple[IdArray, IdArray]:
        order = np.argsort(self.ids)
        return self.ids[order], order

    @cached_property
    def _of_symbol(self) -> tuple[IdArray, npt.NDArray[np.int32]]:
        """What each symbol stands for (an id, a position in `ids`, high bits of an id), and how many bytes follow."""
        symbols = np.arange(256)
        block = np.maximum(symbols - self.num_direct, 0) * BLOCK + self.num_direct
        bits = 8 * _count_raw_bytes(self.num_rows)
        begins = np.where(symbols < self._first_escape, block, np.maximum(symbols - self._first_escape, 0) << bits)
        begins[: self.num_direct] = self.ids[: self.num_direct]
        num_rest = np.where(symbols < self._first_escape, 1, bits // 8)
        num_rest[: self.num_direct] = 0
        return begins, num_rest.astype(np.int32)

    def to_symbols(self, ids: IdArray, *, used: npt.NDArray[np.bool_] | None = None) -> tuple[Bytes, Bytes]:
        """The symbol of every id and the bytes that follow, in the same order; marks the ids it needs in `used`."""
        bits = 8 * _count_raw_bytes(self.num_rows)
        symbols, low = self._first_escape + (ids >> bits), ids & ((1 << bits) - 1)
        if len(self.ids):
            known, position_of = self._by_id
            at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            is_popular = known[at] == ids
            if used is not None:
                used[position_of[at[is_popular]]] = True
            rank = position_of[at] - self.num_direct
            symbols = np.where(is_popular, self.num_direct + np.where(rank < 0, rank, rank // BLOCK), symbols)
            low = np.where(is_popular, rank % BLOCK, low)
        narrow = symbols.astype(np.uint8)
        num_rest = self._of_symbol[1][narrow]
        starts = np.cumsum(num_rest) - num_rest
        rest = np.zeros(int(num_rest.sum()), np.uint8)
        for byte in range(int(num_rest.max(initial=0))):
            own = np.flatnonzero(num_rest > byte)
            rest[starts[own] + byte] = (low[own] >> (8 * byte)) & 255
        return narrow, rest

    def to_ids(self, symbols: Bytes, rest: Bytes) -> IdArray:
        begins, num_rest = self._of_symbol
        return decode_symbols(
            symbols,
            rest,
            begins=begins,
            num_rest=num_rest,
            first_escape=self._first_escape,
            popular=self.ids,
        )


def _count_raw_bytes(num_rows: int) -> int:
    """How many bytes follow the symbol of an id that is not popular."""
    count = 0
    while num_rows > MAX_ESCAPES << (8 * count):
        count += 1
    return count


def _count_direct(num_popular: int, num_rows: int) -> int:
    """How many ids get their own symbol: as many as blocks and escapes leave free."""
    num_free = 256 - -(-num_rows // (1 << (8 * _count_raw_bytes(num_rows))))
    num_blocks = max(0, -(-(num_popular - num_free) // (BLOCK - 1)))
    return min(num_popular, num_free - num_blocks)


def _by_popularity(ids: IdArray) -> IdArray:
    """The ids that occur more than once, most frequent first."""
    seen, counts = np.unique(ids, return_counts=True)
    return seen[np.argsort(-counts, kind="stable")][: int((counts > 1).sum())]


def byte_entropy(values: npt.NDArray[np.integer]) -> float:
    """Bits per value when each of its bytes is coded separately, as byte-stream-split and zstd do."""
    bits = 0.0
    for position in range(values.dtype.itemsize):
        counts = np.bincount((values >> (8 * position)) & 255, minlength=256)
        shares = counts[counts > 0] / max(len(values), 1)
        bits -= float((shares * np.log2(shares)).sum())
    return bits


def dump_popular_ids(table: str, popular: PopularIds, used: npt.NDArray[np.bool_]) -> dict[bytes, bytes]:
    """Metadata for the footer of a part: the table's number of rows and the differences of its popular ids.

    Ids that the part did not use become equal to the id before them, a difference of 0.
    """
    last_used = np.maximum.accumulate(np.where(used, np.arange(len(used)), 0))
    steps = np.diff(popular.ids[last_used], prepend=0)
    return {METADATA_PREFIX + table.encode(): pack_numbers(np.append(popular.num_rows, steps))}


def load_popular_ids(metadata: Mapping[bytes, bytes] | None, table: str) -> PopularIds:
    """The popular ids of a table that a part was written with."""
    return _load(TextKey((metadata or {})[METADATA_PREFIX + table.encode()]))


@lru_cache(maxsize=1024)  # every row group of a part brings the same footer
def _load(key: TextKey) -> PopularIds:
    numbers = unpack_numbers(key.text)
    return PopularIds(ids=np.cumsum(numbers[1:], dtype=np.int64), num_rows=int(numbers[0]))
