"""Numbers as a symbol of one byte and the bytes that follow it: frequent ones are short, others cost about their size.

Times between clicks spread over many magnitudes, and some repeat exactly. Split into bytes, every plane mixes both.
Here a symbol stands for

    one frequent number                   no byte follows
    256^n numbers beginning at one        n bytes follow, the number's low bytes; n is small where numbers are dense
    any other number                      all its 8 bytes follow

The symbols form one stream and the bytes that follow them another, as for ids (popular_ids.py); zstd codes the symbols
by their frequency. Globo, bits per number: gaps between samples 5.4 -> 4.6, a session's first time 24.3 -> 20.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from kernels import decode_symbols
from recmill.data.storage.footer_text import TextKey, pack_numbers, unpack_numbers
from recmill.data.storage.popular_ids import Bytes

NumberArray = npt.NDArray[np.int64]
METADATA_PREFIX = b"recmill.numbers/"  # in the footer of every part, with the name of a column
ALL_BYTES = 8
# By the number of bytes that follow: how many symbols there may be. The last symbol is that of any number.
MAX_SYMBOLS = {0: 64, 1: 88, 2: 56, 3: 28, 4: 12, 5: 4, 6: 2}
# Blocks this small must hold a share of the sample; a larger one saves bytes with every number.
MIN_SHARES = {0: 1 / 512, 1: 1 / 1024, 2: 1 / 4096}


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberCode:
    """Symbol s stands for the numbers from begins_S[s] on whose lowest num_rest_S[s] bytes are arbitrary."""

    begins_S: NumberArray
    num_rest_S: NumberArray

    @classmethod
    def choose(cls, numbers: NumberArray) -> Self:
        """A code for numbers like these."""
        begins, num_rest, left = [np.zeros(1, np.int64)], [ALL_BYTES], numbers
        for count, most in MAX_SYMBOLS.items():
            blocks, counts = np.unique(left >> (8 * count), return_counts=True)
            order = np.argsort(-counts, kind="stable")[:most]
            kept = np.sort(blocks[order[counts[order] >= MIN_SHARES.get(count, 0) * len(numbers)]])
            begins.append(kept << (8 * count))
            num_rest += [count] * len(kept)
            left = left[~np.isin(left >> (8 * count), kept)]
        return cls(begins_S=np.concatenate(begins), num_rest_S=np.array(num_rest, np.int64))

    @cached_property
    def _tables(self) -> tuple[NumberArray, npt.NDArray[np.int32]]:
        """What the kernel needs, for 256 symbols."""
        begins, num_rest = np.zeros(256, np.int64), np.zeros(256, np.int32)
        begins[: len(self.begins_S)], num_rest[: len(self.num_rest_S)] = self.begins_S, self.num_rest_S
        return begins, num_rest

    def to_symbols(self, numbers: NumberArray) -> tuple[Bytes, Bytes]:
        """The symbol of every number and the bytes that follow, in the same order."""
        symbols, left = np.zeros(len(numbers), np.uint8), np.arange(len(numbers))
        for count in MAX_SYMBOLS:
            own = np.flatnonzero(self.num_rest_S == count)  # their begins are sorted
            blocks, wanted = self.begins_S[own] >> (8 * count), numbers[left] >> (8 * count)
            if len(own):
                at = np.minimum(np.searchsorted(blocks, wanted), len(own) - 1)
                found = blocks[at] == wanted
                symbols[left[found]] = own[at[found]]
                left = left[~found]
        num_rest = self._tables[1][symbols]
        low = numbers.astype("<i8").view(np.uint8).reshape(-1, ALL_BYTES)
        return symbols, low[np.arange(ALL_BYTES) < num_rest[:, None]]

    def to_numbers(self, symbols: Bytes, rest: Bytes) -> NumberArray:
        begins, num_rest = self._tables
        return decode_symbols(
            symbols, rest, begins=begins, num_rest=num_rest, first_escape=0, popular=np.zeros(0, np.int64)
        )


def dump_code(column: str, code: NumberCode) -> dict[bytes, bytes]:
    """Metadata for the footer of a part."""
    steps = np.diff(code.begins_S, prepend=0)
    return {METADATA_PREFIX + column.encode(): pack_numbers(np.concatenate([code.num_rest_S, steps]))}


def load_code(metadata: Mapping[bytes, bytes] | None, column: str) -> NumberCode:
    """The code that a column of a part was written with."""
    return _load(TextKey((metadata or {})[METADATA_PREFIX + column.encode()]))


@lru_cache(maxsize=64)  # every row group of a part brings the same footer
def _load(key: TextKey) -> NumberCode:
    num_rest_S, steps_S = np.split(unpack_numbers(key.text), 2)
    return NumberCode(begins_S=np.cumsum(steps_S), num_rest_S=num_rest_S)
