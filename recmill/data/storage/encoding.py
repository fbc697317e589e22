"""Which features of a log are stored once a distinct list, and which of them share an inverse.

The schema proposes (its named groups, its histories), the rows decide: repeating a feature must save more bits than the
inverse costs, and features of one named group that do not change together get an inverse each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kernels import dedup_rows, take_rows
from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema

# A group is stored once a distinct list if that takes at most this share of its bits...
MAX_SHARE = 0.9
# ...or if a list stays for this many samples: what is nearly constant compresses well as it is, but readers save work.
ALWAYS_FACTOR = 2.0
# Features share an inverse if storing them together adds at most this share of distinct lists to either.
GROUP_TOLERANCE = 0.05
# A user's sessions share one history if that leaves at most this share of its ids.
MAX_SHARED = 0.8


@dataclass(frozen=True, kw_only=True)
class FeatureEncoding:
    """How one feature is stored: plain if `group` is empty, else once a distinct list with the inverse of `group`."""

    group: str = ""  # the name of one of the group's features
    windows: bool = False  # the distinct lists of a session are windows into one sequence
    coded: bool = False  # ids are stored as the symbols of popular_ids.py
    shared_by: str = ""  # the feature that says whose history it is; all sessions of a user share it (windows only)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How every feature of a dataset is stored; the part of dataset.json that a reader needs."""

    features: Mapping[str, FeatureEncoding]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The features of each group, in schema order."""
        groups: dict[str, list[str]] = {}
        for name, feature in self.features.items():
            if feature.group:
                groups.setdefault(feature.group, []).append(name)
        return groups

    @property
    def plain(self) -> list[str]:
        return [name for name, feature in self.features.items() if not feature.group]

    def to_json(self) -> dict[str, Any]:
        return {name: asdict(feature) for name, feature in self.features.items()}

    @classmethod
    def from_json(cls, loaded: Any, schema: Schema, *, where: str) -> Self:
        """`loaded` as dataset.json holds it, in schema order (JSON objects have none)."""
        names = [feature.name for feature in schema.features]
        if not isinstance(loaded, dict):
            raise InputError(f"{where}: encoding is {loaded!r}, expected an object")
        if missing := [name for name in names if not isinstance(loaded.get(name), dict)]:
            raise InputError(f"{where}: encoding: {missing[0]!r} is missing")
        features, keys, known_names = {}, {field.name for field in fields(FeatureEncoding)}, ("", *names)
        for name in names:
            entry = loaded[name]
            known = entry.keys() == keys
            named = [entry.get(key) in known_names for key in ("group", "shared_by")]
            flags = [isinstance(entry.get(key), bool) for key in ("windows", "coded")]
            if not all((known, *named, *flags)):
                raise InputError(
                    f"{where}: encoding of {name!r} is {entry}, expected a group, windows, coded and shared_by; "
                    "if another version of recmill wrote the dataset, cluster the log again"
                )
            features[name] = FeatureEncoding(**entry)
        return cls(features=features)


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One feature of sorted rows: row r holds values[offsets[r] : offsets[r + 1]]; a dense value is a list of one."""

    values: Tensor
    offsets: Tensor  # int64

    @classmethod
    def of(cls, rows: pa.Table, name: str) -> Self:
        """Views of the Arrow buffers."""
        column = rows.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if not pa.types.is_list(array.type):
            return cls(values=from_dlpack(array), offsets=torch.arange(len(array) + 1))
        offsets = from_dlpack(array.offsets).long()
        first, last = int(offsets[0]), int(offsets[-1])
        values = array.values.slice(first, last - first)
        # Arrow gives an empty array no address, and torch no tensor for it.
        tensor = from_dlpack(values) if len(values) else torch.empty(0, dtype=torch.int64)
        return cls(values=tensor, offsets=offsets - first)


# R = rows, U = distinct rows
def dedup_in_sessions(session_R: Tensor, columns: Sequence[Column]) -> tuple[Tensor, Tensor]:
    """The distinct rows of every session, in their order, and the row's position among them all."""
    each = torch.arange(len(session_R) + 1)
    values, offsets = [column.values for column in columns], [column.offsets for column in columns]
    return dedup_rows([session_R, *values], [each, *offsets])


def inverse_events(
    unique_U: Tensor, inverse_R: Tensor, first_R: Tensor
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """The inverse as it is stored: whether a row differs from the one before, and what those that do are.

    Both leave out the rows that begin a session (`first_R`): they are new. Of the others, one that differs is 0 if it
    is new too, or 1 + k if it is the session's k-th distinct row again; if all are new, nothing is stored of that.
    """
    is_new_R = torch.zeros(len(inverse_R), dtype=torch.bool)
    is_new_R[unique_U] = True
    changed_R = torch.ones(len(inverse_R), dtype=torch.bool)
    changed_R[1:] = inverse_R[1:] != inverse_R[:-1]
    rows_C = torch.nonzero(changed_R & ~first_R).reshape(-1)
    base_R = inverse_R[first_R][torch.cumsum(first_R, 0) - 1]  # a session's first row is its first distinct one
    again_C = torch.where(is_new_R[rows_C], 0, 1 + inverse_R[rows_C] - base_R[rows_C]).int().numpy()
    return changed_R[~first_R].numpy(), again_C if again_C.any() else again_C[:0]


def session_firsts(session_R: Tensor) -> Tensor:
    """Whether a row is the first of its session."""
    first_R = torch.ones(len(session_R), dtype=torch.bool)
    first_R[1:] = session_R[1:] != session_R[:-1]
    return first_R


@dataclass(kw_only=True, eq=False)
class _Candidate:
    """Features that change together, and what storing them once a distinct list would take."""

    names: list[str]
    inverse_R: Tensor
    unique_U: Tensor
    plain_bits: float = 0.0
    distinct_bits: float = 0.0

    def joined_by(self, other: _Candidate) -> _Candidate | None:
        """Both as one, unless that adds distinct rows to either."""
        each = torch.arange(len(self.inverse_R) + 1)
        unique_U, inverse_R = dedup_rows([self.inverse_R, other.inverse_R], [each, each])
        if len(unique_U) > (1 + GROUP_TOLERANCE) * min(len(self.unique_U), len(other.unique_U)):
            return None
        return _Candidate(
            names=self.names + other.names,
            inverse_R=inverse_R,
            unique_U=unique_U,
            plain_bits=self.plain_bits + other.plain_bits,
            distinct_bits=self.distinct_bits + other.distinct_bits,
        )

    def pays(self, session_R: Tensor) -> bool:
        num_changes = 1 + int((self.inverse_R[1:] != self.inverse_R[:-1]).sum())
        if len(self.inverse_R) >= ALWAYS_FACTOR * num_changes:
            return True
        changed, again = inverse_events(self.unique_U, self.inverse_R, session_firsts(session_R))
        inverse_bits = sum(len(stored) * entropy_bits(stored) for stored in (changed, again) if len(stored))
        return self.distinct_bits + inverse_bits <= MAX_SHARE * self.plain_bits


def choose_encoding(rows: pa.Table, schema: Schema) -> Encoding:
    """The encoding that suits `rows`: whole sessions, sorted."""
    session_R = from_dlpack(rows.column("session_id").combine_chunks())
    proposed: dict[str, list[str]] = {}
    for feature in schema.features:
        proposed.setdefault(f"group/{feature.group}" if feature.group else feature.name, []).append(feature.name)
    chosen: list[_Candidate] = []
    for names in proposed.values():
        joint: list[_Candidate] = []
        for name in names:
            found = _examine(name, Column.of(rows, name), session_R)
            for position, candidate in enumerate(joint):
                if (both := candidate.joined_by(found)) is not None:
                    joint[position] = both
                    break
            else:
                joint.append(found)
        for candidate in joint:
            if any(schema.feature(name).shift for name in candidate.names) or candidate.pays(session_R):
                # The same inverse is not stored twice, even for features of different groups.
                same = next((own for own in chosen if torch.equal(own.inverse_R, candidate.inverse_R)), None)
                if same is None:
                    chosen.append(candidate)
                else:
                    same.names += candidate.names
    features = {feature.name: FeatureEncoding() for feature in schema.features}
    for candidate in chosen:
        for name in candidate.names:
            features[name] = FeatureEncoding(group=candidate.names[0], windows=schema.feature(name).shift)
    return Encoding(features=features)


def _examine(name: str, column: Column, session_R: Tensor) -> _Candidate:
    unique_U, inverse_R = dedup_in_sessions(session_R, [column])
    distinct, _ = take_rows([column.values], [column.offsets], unique_U)
    bits = entropy_bits(distinct.numpy())
    return _Candidate(
        names=[name],
        inverse_R=inverse_R,
        unique_U=unique_U,
        plain_bits=bits * len(column.values),
        distinct_bits=bits * len(distinct),
    )


def entropy_bits(values: npt.NDArray[Any]) -> float:
    """Bits a value that no code without context can go below."""
    counts = np.unique(values, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


KEYS = ("session_id", "timestamp/first", "timestamp/last")  # their statistics say what a row group holds


def record_schema(schema: Schema, encoding: Encoding) -> pa.Schema:
    """The Arrow schema of the records. What cannot be missing is declared so: Parquet then stores no levels for it."""
    columns: dict[str, pa.DataType] = dict.fromkeys(KEYS, pa.int64())
    columns |= {"session/num_rows": pa.int32(), "timestamp/gaps": pa.int64(), "label": pa.float32()}
    for group in encoding.groups:
        columns |= {f"{group}/changed": pa.bool_(), f"{group}/again": pa.int32()}
    for feature in schema.features:
        columns |= _columns_of_feature(feature, encoding.features[feature.name])
    return pa.schema([pa.field(name, lists_of(kind), nullable=False) for name, kind in columns.items()])


def _columns_of_feature(feature: Feature, own: FeatureEncoding) -> dict[str, pa.DataType]:
    """Its own columns, without those of its group."""
    if feature.kind == "dense":
        return {feature.name: pa.int32()}
    columns = {f"{feature.name}/lengths": pa.int32()}
    if own.windows:
        columns[f"{feature.name}/ends"] = pa.int32()
    if not own.shared_by:
        columns[feature.name] = pa.uint8() if own.coded else pa.int64()
        if own.coded:
            columns[f"{feature.name}/rest"] = pa.uint8()
    return columns


def columns_of(name: str, schema: Schema, encoding: Encoding) -> list[str]:
    """The columns of the records that the rows' column `name` is decoded from, besides `label`."""
    if name == "label":
        return ["label", "session/num_rows"]
    if name == "session_id":
        return ["session_id"]
    if name == "timestamp":
        return ["timestamp/first", "timestamp/gaps"]
    own = encoding.features[name]
    columns = [f"{own.group}/changed", f"{own.group}/again"] if own.group else []
    columns += _columns_of_feature(schema.feature(name), own)
    return columns + (columns_of(own.shared_by, schema, encoding) if own.shared_by else [])


def lists_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))
