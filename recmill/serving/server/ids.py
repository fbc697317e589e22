"""Rows of ids as the caller knows them: by the model's vocabulary, or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recmill.data.dense_values import DenseValues
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.vocabulary import MAP_FILE, Vocabulary, VocabularyMap, hash_value

Ints = npt.NDArray[np.int64]
UNKNOWN_ROW = 0
MAX_WIDTH = 32  # bytes per value of a table of fixed width; longer texts are looked up in a dict, which is larger


class RowFinder(Protocol):
    """Rows of the values of one table, and which of the values are unknown."""

    takes_text: bool  # as well as numbers

    def find(self, values: Sequence[Any] | Ints) -> tuple[Ints, int]: ...


class PlainRows:
    """Ids are rows. Rows that the table does not have get the unknown row."""

    takes_text = False

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def find(self, values: Sequence[Any] | Ints) -> tuple[Ints, int]:
        ids = np.asarray(values, np.int64)
        is_unknown = (ids < 0) | (ids >= self.num_rows)
        return np.where(is_unknown, UNKNOWN_ROW, ids), int(is_unknown.sum())


class HashedRows:
    """Every value has the row of its hash: none is unknown."""

    takes_text = True

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def find(self, values: Sequence[Any] | Ints) -> tuple[Ints, int]:
        return np.array([hash_value(_plain(value), self.num_rows) for value in values], np.int64), 0


class VocabularyRows:
    """Values with a row of their own by binary search; all others have the unknown row, or a row by their hash.

    `Vocabulary.rows` builds an index of the whole table per call, which is right for many values and wrong for a
    request.
    """

    takes_text = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rare_rows = vocabulary.rare_rows
        self.of_numbers = pa.types.is_integer(vocabulary.values.type)
        self.by_text: dict[bytes, int] | None = None
        if self.of_numbers:
            values = vocabulary.values.to_numpy(zero_copy_only=False).astype(np.int64)
        else:
            texts = vocabulary.values.cast(pa.large_binary())
            longest = pc.max(pc.binary_length(texts)).as_py() or 1
            found = texts.to_pylist()
            if longest > MAX_WIDTH or any(text.endswith(b"\0") for text in found):
                self.by_text = dict(zip(found, vocabulary.own_rows.tolist(), strict=True))
            values = np.array([] if self.by_text is not None else found, dtype=f"S{min(longest, MAX_WIDTH)}")
        order = np.argsort(values, kind="stable")
        self.values = values[order]
        self.rows = vocabulary.own_rows[order] if self.by_text is None else np.empty(0, np.int64)

    def find(self, values: Sequence[Any] | Ints) -> tuple[Ints, int]:
        found, is_known = self._find_numbers(values) if self.of_numbers else self._find_texts(values)
        unknown = np.flatnonzero(~is_known)
        if self.rare_rows:
            for place in unknown.tolist():
                found[place] = hash_value(_plain(values[place]), self.rare_rows + 1)
        return found, len(unknown)

    def _find_texts(self, values: Sequence[Any] | Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        if self.by_text is not None:
            rows = np.array([self.by_text.get(text, -1) for text in texts], np.int64)
            return np.maximum(rows, UNKNOWN_ROW), rows >= 0
        width = self.values.dtype.itemsize
        fits = np.array([len(text) <= width and not text.endswith(b"\0") for text in texts], bool)
        return self._search(np.array(texts, dtype=self.values.dtype), fits)

    def _find_numbers(self, values: Sequence[Any] | Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        if isinstance(values, np.ndarray):
            return self._search(values, np.ones(len(values), bool))
        numbers = [_number(value) for value in values]
        is_number = np.array([number is not None for number in numbers], bool)
        return self._search(np.array([number or 0 for number in numbers], np.int64), is_number)

    def _search(self, asked: npt.NDArray[Any], may_match: npt.NDArray[np.bool_]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        if not len(self.values) or not len(asked):
            return np.full(len(asked), UNKNOWN_ROW, np.int64), np.zeros(len(asked), bool)
        places = np.minimum(np.searchsorted(self.values, asked), len(self.values) - 1)
        is_known = may_match & (self.values[places] == asked)
        return np.where(is_known, self.rows[places], UNKNOWN_ROW), is_known


def _number(value: Any) -> int | None:
    """The value as int64; None if it is no such number, as in a vocabulary of numbers only those are known."""
    try:
        number = int(value)
    except ValueError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _plain(value: Any) -> Any:
    """The value as its hash is made of: text, or a number."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def load_finders(folder: str | Path, tables: dict[str, int]) -> dict[str, RowFinder]:
    """For each table, by its number of rows, how its rows are found: by FOLDER/vocabulary if there is one."""
    plain: dict[str, RowFinder] = {name: PlainRows(num_rows) for name, num_rows in tables.items()}
    if not Path(folder, VOCABULARY_FOLDER, MAP_FILE).is_file():
        return plain
    known = VocabularyMap.load(folder).tables
    for name in tables:
        if name in known:
            own = known[name]
            plain[name] = HashedRows(own.num_rows) if own.hashed else VocabularyRows(Vocabulary.load(folder, name))
    return plain


def load_dense_values(folder: str | Path) -> Mapping[str, DenseValues]:
    """What becomes of numbers of the original data, by feature; empty for a model without FOLDER/vocabulary."""
    return VocabularyMap.load(folder).dense if Path(folder, VOCABULARY_FOLDER, MAP_FILE).is_file() else {}
