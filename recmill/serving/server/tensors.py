"""A call's named tensors as a batch of requests; every mistake is one sentence that names the tensor.

R requests with N candidates in all. A tensor of a user's feature has R rows, that of a candidate's feature N:

    candidates       INT64 [R]        candidates per request; may be left out for one request
    age              FP32  [R]        dense features: one number per row
    item             INT64 [N]        ids: one per row; INT64 or BYTES
    tags             INT64 [N, 3]     or several per row; -1 (INT64) and "" (BYTES) are no id
    history          INT64 [V]        or lists one after another ...
    history.lengths  INT64 [R]        ... with the length of each

Features with ids may be left out: their lists are empty.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.data.dense_values import DenseValues
from recmill.data.transforms import Transforms
from recmill.serving.batch import RequestBatch
from recmill.serving.server.errors import BadRequest, TooLarge
from recmill.serving.server.ids import UNKNOWN_ROW, PlainRows, RowFinder
from recmill.serving.signature import RequestFeature, Side, Signature

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Lists = tuple[Sequence[Any] | npt.NDArray[Any], Ints]  # values, lengths

COUNTS = "candidates"
LENGTHS = ".lengths"
INTEGERS = {f"{sign}INT{bits}": np.dtype(f"{sign.lower()}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
FLOATS = {f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
NUMBERS = {**INTEGERS, **FLOATS, "BOOL": np.dtype(bool)}


@dataclass(frozen=True, kw_only=True)
class CallTensor:
    """A tensor of a call as the protocol has it: numbers and texts in (nested) lists, or raw bytes."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | bytes

    def array(self) -> npt.NDArray[Any] | list[bytes | str]:
        """Flat numbers, or flat texts; checked against datatype and shape."""
        shape = self.shape
        if not shape or any(type(size) is not int or size < 0 for size in shape) or len(shape) > 2:
            raise BadRequest(f"input {self.name!r}: its shape is {list(shape)!r}, expected [rows] or [rows, values]")
        size = math.prod(shape)
        if self.datatype == "BYTES":
            found: Any = _unpack_texts(self.data, self.name) if isinstance(self.data, bytes) else list(_flat(self.data))
            wrong = next((text for text in found if not isinstance(text, bytes | str)), None)
            if wrong is not None:
                raise BadRequest(f"input {self.name!r}: datatype BYTES holds texts, received {_shown(wrong)}")
        elif self.datatype in NUMBERS:
            found = self._numbers(NUMBERS[self.datatype])
        else:
            known = ", ".join((*NUMBERS, "BYTES"))
            raise BadRequest(f"input {self.name!r}: unknown datatype {_shown(self.datatype)}, expected one of {known}")
        if len(found) != size:
            raise BadRequest(f"input {self.name!r}: has {len(found):,} values, its shape {list(shape)} says {size:,}")
        return found  # type: ignore[no-any-return]

    def _numbers(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if isinstance(self.data, bytes):
            if len(self.data) % dtype.itemsize:
                raise BadRequest(f"input {self.name!r}: {len(self.data)} raw bytes are no whole number of {dtype}")
            return np.frombuffer(self.data, dtype)
        kinds = "iub" if dtype.kind in "iu" else "b" if dtype.kind == "b" else "iufb"
        try:
            found = np.asarray(self.data)
            if not found.size:
                return np.empty(0, dtype)
            if found.dtype.kind in kinds:
                info = np.iinfo(dtype) if dtype.kind in "iu" else None
                if info is None or (found.min() >= info.min and found.max() <= info.max):
                    return found.ravel().astype(dtype)
        except (ValueError, OverflowError, TypeError):
            pass
        raise BadRequest(f"input {self.name!r}: its data must be a list of {self.datatype} values")


def _flat(data: Iterable[Any]) -> Iterable[Any]:
    for entry in data:
        if isinstance(entry, list | tuple):
            yield from entry
        else:
            yield entry


def _unpack_texts(raw: bytes, name: str) -> list[bytes]:
    """Texts of raw BYTES: each after its length in 4 bytes, little-endian."""
    found, place = [], 0
    while place < len(raw):
        if place + 4 > len(raw):
            raise BadRequest(f"input {name!r}: its raw bytes end inside a length")
        (size,) = struct.unpack_from("<I", raw, place)
        place += 4
        if place + size > len(raw):
            raise BadRequest(f"input {name!r}: its raw bytes end inside a text of {size:,} bytes")
        found.append(raw[place : place + size])
        place += size
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, kw_only=True)
class RequestReader:
    """Makes batches of one model from calls, and counts ids that its tables do not know."""

    signature: Signature
    finders: Mapping[str, RowFinder]  # by table
    transforms: Transforms
    transformed: frozenset[str]  # features that have transforms
    dense_values: Mapping[str, DenseValues]  # what becomes of numbers of the original data, by feature
    max_candidates: int

    def read(self, tensors: Iterable[CallTensor]) -> tuple[RequestBatch, dict[str, int]]:
        """The requests of a call, and how many unknown ids each feature has (features without any are left out)."""
        given: dict[str, CallTensor] = {}
        for tensor in tensors:
            if tensor.name in given:
                raise BadRequest(f"input {tensor.name!r} is given twice")
            given[tensor.name] = tensor
        self._check_names(given)
        counts_R = self._counts(given)
        rows = {"user": len(counts_R), "candidate": int(counts_R.sum())}
        if rows["candidate"] > self.max_candidates:
            raise TooLarge(
                f"input {COUNTS!r}: the call has {rows['candidate']:,} candidates, at most {self.max_candidates:,} are "
                "allowed"
            )
        unknown: dict[str, int] = {}
        ids: dict[Side, dict[str, tuple[Ints, Ints]]] = {"user": {}, "candidate": {}}
        for feature in self.signature.features:
            lists = self._lists(given, feature.name, rows[feature.side])
            ids[feature.side][feature.name] = self._rows(feature, lists, unknown)
        batch = RequestBatch(
            counts_R=counts_R,
            dense_user_RF=self._dense(given, self.signature.dense_user, rows["user"]),
            dense_candidate_NF=self._dense(given, self.signature.dense_candidate, rows["candidate"]),
            user_ids=ids["user"],
            candidate_ids=ids["candidate"],
        )
        return batch, unknown

    def _check_names(self, given: Mapping[str, CallTensor]) -> None:
        features = [feature.name for feature in self.signature.features]
        dense = [*self.signature.dense_user, *self.signature.dense_candidate]
        known = {COUNTS, *dense, *features, *(name + LENGTHS for name in features)}
        for name in given:
            if name not in known:
                listed = ", ".join((COUNTS, *dense, *features))
                raise BadRequest(f"input {_shown(name)}: the model has no such input, it has {listed}")
            if name.endswith(LENGTHS) and name.removesuffix(LENGTHS) not in given:
                raise BadRequest(f"input {name!r} is given without {name.removesuffix(LENGTHS)!r}")

    def _counts(self, given: Mapping[str, CallTensor]) -> Ints:
        if COUNTS in given:
            counts = _whole_numbers(given[COUNTS])
            if not len(counts):
                raise BadRequest(f"input {COUNTS!r} is empty: a call has one request or more")
            return counts
        for name in (*self.signature.dense_candidate, *(f.name for f in self.signature.of_side("candidate"))):
            if name in given:  # one request: all rows are its candidates
                tensor = given.get(name + LENGTHS, given[name])
                return np.array([tensor.shape[0] if tensor.shape and type(tensor.shape[0]) is int else 0], np.int64)
        raise BadRequest(f"input {COUNTS!r} is missing, and no feature of candidates says how many there are")

    def _dense(self, given: Mapping[str, CallTensor], names: Sequence[str], num_rows: int) -> Floats:
        dense = np.empty((num_rows, len(names)), np.float32)
        for place, name in enumerate(names):
            if name not in given:
                raise BadRequest(f"input {name!r} is missing: expected {num_rows:,} numbers")
            values = given[name].array()
            if isinstance(values, list):
                raise BadRequest(f"input {name!r}: expected numbers, received datatype BYTES")
            if len(values) != num_rows:
                raise BadRequest(f"input {name!r}: has {len(values):,} values, expected {num_rows:,}: one per row")
            with np.errstate(over="ignore"):
                known = self.dense_values.get(name)
                numbers = values.astype(np.float32) if known is None else known.apply(values)
                column = self.transforms.values(name, numbers)
            if not np.isfinite(column).all():
                raise BadRequest(f"input {name!r}: value {int(np.argmin(np.isfinite(column)))} is not a finite number")
            dense[:, place] = column
        return dense

    def _lists(self, given: Mapping[str, CallTensor], name: str, num_rows: int) -> Lists:
        if name not in given:
            return [], np.zeros(num_rows, np.int64)
        tensor = given[name]
        values = tensor.array()
        if name + LENGTHS in given:
            lengths = _whole_numbers(given[name + LENGTHS])
            if len(lengths) != num_rows:
                raise BadRequest(f"input {name + LENGTHS!r}: has {len(lengths):,} values, expected {num_rows:,}")
            if lengths.sum() != len(values) or lengths.max(initial=0) > len(values):
                raise BadRequest(
                    f"input {name + LENGTHS!r}: adds up to {lengths.sum():,}, but {name!r} has {len(values):,} values"
                )
        elif tensor.shape[0] != num_rows:
            raise BadRequest(f"input {name!r}: has {tensor.shape[0]:,} rows, expected {num_rows:,}")
        else:
            lengths = np.full(num_rows, len(values) // num_rows if num_rows else 0, np.int64)
        return _without_padding(values, lengths, name)

    def _rows(self, feature: RequestFeature, lists: Lists, unknown: dict[str, int]) -> tuple[Ints, Ints]:
        """Values and offsets of a feature's lists as rows of its table."""
        values, lengths = lists
        finder = self.finders[feature.table]
        if isinstance(values, list) and values and not finder.takes_text:
            raise BadRequest(f"input {feature.name!r}: the model has no vocabulary for it, so ids are rows (INT64)")
        is_transformed = feature.name in self.transformed
        if is_transformed and isinstance(finder, PlainRows):
            ids, num_unknown = np.asarray(values, np.int64), 0  # transforms bring any id into the table's range
        else:
            ids, num_unknown = finder.find(values)
        starts = np.cumsum(lengths) - lengths
        if is_transformed:
            ids, lengths = _packed(*self.transforms.lists(feature.name, ids, starts, lengths.astype(np.int32)))
            is_unknown = (ids < 0) | (ids >= feature.num_rows)
            ids, num_unknown = np.where(is_unknown, UNKNOWN_ROW, ids), num_unknown + int(is_unknown.sum())
        if num_unknown:
            unknown[feature.name] = num_unknown
        return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _packed(values: Ints, starts: Ints, lengths: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    parts = [values[start : start + size] for start, size in zip(starts, lengths, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *parts]), lengths.astype(np.int64)


def _whole_numbers(tensor: CallTensor) -> Ints:
    values = tensor.array()
    if isinstance(values, list) or values.dtype.kind not in "iu":
        raise BadRequest(f"input {tensor.name!r}: expected whole numbers, received datatype {tensor.datatype}")
    if len(values) and (values.min() < 0 or values.max() > 1 << 40):
        raise BadRequest(f"input {tensor.name!r}: expected numbers of 0 or more")
    return values.astype(np.int64)


def _without_padding(values: npt.NDArray[Any] | list[bytes | str], lengths: Ints, name: str) -> Lists:
    if isinstance(values, list):
        is_id = np.fromiter((len(text) > 0 for text in values), bool, len(values))
    elif values.dtype.kind not in "iu":
        raise BadRequest(f"input {name!r}: ids are whole numbers (INT64) or texts (BYTES)")
    else:
        if values.dtype == np.uint64 and len(values) and values.max() >= 1 << 63:
            raise BadRequest(f"input {name!r}: ids must fit INT64")
        values = values.astype(np.int64)
        is_id = values != -1
    if is_id.all():
        return values, lengths
    lists = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.bincount(lists[is_id], minlength=len(lengths)).astype(np.int64)
    if isinstance(values, list):
        return [text for text, keep in zip(values, is_id, strict=True) if keep], kept
    return values[is_id], kept
