"""The histories of a part, one sequence per user: sessions point into it instead of repeating earlier ones.

    user 7, session 1:   [a, b]  [a, b, c]           sequence of user 7:  a b c d e
    user 7, session 2:   [b, c, d]  [c, d, e]        windows end at:      2 3 | 4 5

While a part is written its sequences only grow at the end, so windows keep their places. When the part is closed, they
go into the footer, which every reader of a row group has. The feature `shared_by` identifies the user.

A click is in the histories after it, so its own row need not store it: it is the id that follows its history (`follows`
of encoding.py). The last click of a session is appended as its `tail`, since a later part of the log will need it.

Measured gain (benchmarks/codecs.py): globo 5.07 bytes per row instead of 6.94, read at 0.93 times the speed. recd has
no feature that identifies the user.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from recmill.data.storage.footer_text import TextKey, pack_bytes, pack_numbers, unpack_bytes, unpack_numbers
from recmill.data.storage.popular_ids import Bytes, PopularIds

IdArray = npt.NDArray[np.int64]
METADATA_PREFIX = "recmill.sequences/"  # followed by the name of a feature and one of its columns
# How far before the end of a user's sequence, minus its own length, a session may begin.
SEARCH_IDS = 1_024
ID_BYTES = 8


class SequenceWriter:
    """The sequences of one feature while a part is written."""

    def __init__(self) -> None:
        self._sequences: dict[int, bytearray] = {}  # in the order of first appearance
        self._places: dict[int, int] = {}
        self.num_ids = 0

    def lay(
        self, keys_S: IdArray, values: IdArray, sizes_S: IdArray, *, tails: Mapping[int, int] = MappingProxyType({})
    ) -> IdArray:
        """Where each session's sequence begins in that of its user; ids that are new are appended.

        `tails` holds, for some sessions, the id that will follow.
        """
        data, ends = values.tobytes(), (ID_BYTES * np.cumsum(sizes_S)).tolist()
        self.place(keys_S)
        begins_S, start = np.empty(len(keys_S), np.int64), 0
        for number, (key, end) in enumerate(zip(keys_S.tolist(), ends, strict=True)):
            own = data[start:end]
            start = end
            known = self._sequences[key]
            begin = find_overlap(known, own)
            known += own[len(known) - begin :]
            if number in tails and begin + len(own) == len(known):
                known += tails[number].to_bytes(ID_BYTES, sys.byteorder, signed=True)
            begins_S[number] = begin // ID_BYTES
        self.num_ids = sum(map(len, self._sequences.values())) // ID_BYTES
        return begins_S

    def place(self, keys: IdArray) -> IdArray:
        """The keys as places in the order of their first appearance: first how many there were, then, for each key, 0
        if it is new, else how many places before the newest its own is, from 1.
        """
        codes = [len(self._sequences)]
        for key in keys.tolist():
            if (place := self._places.setdefault(key, len(self._places))) == len(self._sequences):
                self._sequences[key] = bytearray()
                codes.append(0)
            else:
                codes.append(len(self._places) - place)
        return np.array(codes, np.int64)

    def following(self, keys: IdArray, positions: IdArray) -> tuple[IdArray, npt.NDArray[np.bool_]]:
        """The ids at positions in the sequences of keys, and whether they are there."""
        known, key_of = np.unique(keys, return_inverse=True)
        own = [self._sequences[key] for key in known.tolist()]
        sizes = np.array([len(sequence) // ID_BYTES for sequence in own], np.int64)
        ids = np.append(np.frombuffer(b"".join(own), np.int64), 0)
        is_there = positions < sizes[key_of]
        at = (np.cumsum(sizes) - sizes)[key_of] + positions
        return ids[np.where(is_there, at, -1)], is_there

    def dump(self, feature: str, to_symbols: Callable[[IdArray], tuple[Bytes, Bytes]] | None) -> dict[bytes, bytes]:
        """The sequences as metadata for the footer, by key."""
        keys = list(self._sequences)
        sizes = np.array([len(self._sequences[key]) // ID_BYTES for key in keys], np.int64)
        ids = np.frombuffer(b"".join(self._sequences[key] for key in keys), np.int64)
        steps: IdArray = np.diff(np.array(keys, np.int64), prepend=0).astype(np.int64, copy=False)
        columns = {"keys": pack_numbers(steps), "sizes": pack_numbers(sizes)}
        if to_symbols is None:
            columns["ids"] = pack_numbers(ids)
        else:
            columns["symbols"], columns["rest"] = map(pack_bytes, to_symbols(ids))
        return {f"{METADATA_PREFIX}{feature}/{name}".encode(): text for name, text in columns.items()}


def find_overlap(known: bytearray, own: bytes) -> int:
    """The first place, in bytes, from which `known` equals `own` as far as both reach; else the end of `known`."""
    first, at = own[:ID_BYTES], max(0, len(known) - len(own) - SEARCH_IDS * ID_BYTES)
    while own and (at := known.find(first, at)) >= 0:
        if at % ID_BYTES == 0 and known[at : at + len(own)] == own[: len(known) - at]:
            return at
        at += 1
    return len(known)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """The sequences of one feature of a part; that of keys[k] is values[offsets[k] : offsets[k + 1]]."""

    keys: IdArray
    offsets: IdArray
    values: IdArray

    def begins(self, keys_S: IdArray) -> IdArray:
        """Where the sequences of the keys begin among the values."""
        sorted_keys, order = self._sorted
        begins_S: IdArray = self.offsets[order[np.searchsorted(sorted_keys, keys_S)]]
        return begins_S

    @cached_property
    def _sorted(self) -> tuple[IdArray, IdArray]:
        order = np.argsort(self.keys)
        return self.keys[order], order


def places_of(codes: IdArray) -> IdArray:
    """The places, in the order of first appearance, of the keys that `SequenceWriter.place` was given."""
    is_new = codes[1:] == 0
    count = codes[0] + np.cumsum(is_new)
    places: IdArray = count - codes[1:] - is_new
    return places


def load_sequences(metadata: Mapping[bytes, bytes] | None, feature: str, popular: PopularIds | None) -> Sequences:
    """The sequences of a feature that a part was written with."""
    names = ("keys", "sizes", "ids") if popular is None else ("keys", "sizes", "symbols", "rest")
    texts = [TextKey((metadata or {})[f"{METADATA_PREFIX}{feature}/{name}".encode()]) for name in names]
    return _load(popular, *texts)


@lru_cache(maxsize=8)  # every row group of a part brings the same footer
def _load(popular: PopularIds | None, keys: TextKey, sizes: TextKey, *ids: TextKey) -> Sequences:
    offsets = np.concatenate([[0], np.cumsum(unpack_numbers(sizes.text))])
    texts = [own.text for own in ids]
    values = unpack_numbers(texts[0]) if popular is None else popular.to_ids(*map(unpack_bytes, texts))
    return Sequences(keys=np.cumsum(unpack_numbers(keys.text)), offsets=offsets, values=values)
