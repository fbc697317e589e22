"""Which features of a log are stored once per distinct list, and which of them share an inverse.

The schema proposes (its named groups, its histories) and the rows decide: storing a feature's distinct lists must save
more bits than the inverse costs. Features of a named group that do not change together get separate inverses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import dedup_rows, take_rows
from recmill.artifacts import InputError, read_record
from recmill.data.repeats import join_alike
from recmill.data.schema import Feature, Schema

# Of the records and footers. 2 has neither followers nor coded times, and footers in base 64; it can be read. 1 cannot.
FORMAT = 3
READABLE = (2, 3)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# A group is stored once per distinct list if that takes at most this share of its bits...
MAX_SHARE = 0.9
# ...or if lists stay for this many samples: nearly constant lists compress well anyway, but readers save work.
ALWAYS_FACTOR = 2.0
# The sessions of a user share one history if that stores at most this share of the ids.
MAX_SHARED = 0.8


@dataclass(frozen=True, kw_only=True)
class FeatureEncoding:
    """How one feature is stored: plain if `group` is empty, else once per distinct list with the inverse of `group`."""

    group: str = ""  # the name of one of the group's features
    windows: bool = False  # the distinct lists of a session are windows into one sequence
    coded: bool = False  # ids are stored as the symbols of popular_ids.py
    shared_by: str = ""  # the feature that identifies the user, whose sessions share one history (windows only)
    splits_ends: bool = False  # where the first list of each session ends is a column of its own (windows only)
    follows: str = ""  # the shared history whose next id it often is; those ids are not stored again (plain only)
    placed: bool = False  # it identifies the user, and ids are stored as places among the users of the part
    marks_firsts: bool = False  # of a group's first feature: `changed` has a bit for the first row of a session too


@dataclass(frozen=True, kw_only=True)
class TimeEncoding:
    """How timestamps are stored: as numbers, or as the symbols of numbers.py."""

    first_coded: bool = False
    gaps_coded: bool = False
    split_by: str = ""  # a group: the gaps to rows at which it stays as it is are a column of their own
    # A session's first time is stored less session_id // divisor: ids often begin with the time. 0: as it is.
    divisor: int = 0


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How every feature of a dataset is stored: the part of dataset.json that a reader needs."""

    features: Mapping[str, FeatureEncoding]
    times: TimeEncoding = field(default_factory=TimeEncoding)

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

    def history_of(self, user: str) -> str:
        """The first of the histories that a feature shares: its store knows all users of a part."""
        return next(name for name, own in self.features.items() if own.shared_by == user)

    def to_json(self) -> dict[str, Any]:
        features = {name: asdict(own) for name, own in self.features.items()}
        return {"format": FORMAT, "features": features, "times": asdict(self.times)}

    @classmethod
    def from_json(cls, loaded: Any, schema: Schema, *, where: str) -> Self:
        """From the content of dataset.json, in schema order (JSON objects have no order)."""
        names = [feature.name for feature in schema.features]
        if not isinstance(loaded, dict) or loaded.get("format") not in READABLE:
            raise InputError(
                f"{where}: the deduplicated layout was written by another version of recmill, expected its format "
                f"{' or '.join(map(str, READABLE))}; cluster the log again"
            )
        times = read_record(TimeEncoding, loaded.get("times", {}), where=where, key="encoding.times")
        loaded = loaded.get("features")
        if not isinstance(loaded, dict):
            raise InputError(f"{where}: encoding is {loaded!r}, expected an object")
        features = {}
        for name in names:
            own = features[name] = read_record(FeatureEncoding, loaded.get(name), where=where, key=f"encoding.{name}")
            if not {own.group, own.shared_by, own.follows} <= {"", *names}:
                raise InputError(f"{where}: encoding.{name} is {own}, expected names of features")
        found = cls(features=features, times=times)
        found._check(where)
        return found

    def _check(self, where: str) -> None:
        """Raise if a feature refers to one that is not stored as it needs."""
        users = {own.shared_by for own in self.features.values()}
        for name, own in self.features.items():
            if own.follows and (own.group or not self.features[own.follows].shared_by):
                raise InputError(f"{where}: encoding.{name} follows {own.follows!r}, expected a shared history")
            if own.placed and name not in users:
                raise InputError(f"{where}: encoding.{name} is placed, expected a feature that shares a history")
        if self.times.split_by not in ("", *self.groups):
            raise InputError(f"{where}: encoding.times.split_by is {self.times.split_by!r}, expected a group")


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One feature of sorted rows: row r holds values[offsets[r] : offsets[r + 1]]; a dense value is a list of one."""

    values: npt.NDArray[Any]
    offsets: IntArray

    @classmethod
    def of(cls, rows: pa.Table, name: str) -> Self:
        """Views of the Arrow buffers."""
        column = rows.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if not pa.types.is_list(array.type):
            return cls(values=array.to_numpy(), offsets=np.arange(len(array) + 1))
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        return cls(values=array.values.slice(first, last - first).to_numpy(), offsets=offsets - first)

    def take(self, rows: IntArray) -> tuple[npt.NDArray[Any], IntArray]:
        """The values of some rows, one row after another, and how many each has."""
        return take_rows([self.values], [self.offsets], rows, num_threads=1)


# R = rows, U = distinct rows. One thread: more cost more than they save here.
def dedup_in_sessions(session_R: IntArray, columns: Sequence[Column]) -> tuple[IntArray, IntArray]:
    """The distinct rows of every session, in their order, and for each row its position among all of them."""
    each = np.arange(len(session_R) + 1)
    values, offsets = [own.values for own in columns], [own.offsets for own in columns]
    return dedup_rows([session_R, *values], [each, *offsets], num_threads=1)


def inverse_events(
    unique_U: IntArray, inverse_R: IntArray, first_R: BoolArray
) -> tuple[BoolArray, npt.NDArray[np.int32]]:
    """The inverse as it is stored: whether each row differs from the one before, and what the rows that differ are.

    Both omit the rows that begin a session (`first_R`), which are always new. A row that differs is 0 if it is new, or
    1 + k if it equals the session's k-th distinct row. If all rows that differ are new, the second array is empty.
    """
    is_new_R = np.zeros(len(inverse_R), np.bool_)
    is_new_R[unique_U] = True
    changed_R = np.ones(len(inverse_R), np.bool_)
    np.not_equal(inverse_R[1:], inverse_R[:-1], out=changed_R[1:])
    rows_C = np.flatnonzero(changed_R & ~first_R)
    base_R = inverse_R[first_R][np.cumsum(first_R) - 1]  # the first row of a session is its first distinct row
    again_C = np.where(is_new_R[rows_C], 0, 1 + inverse_R[rows_C] - base_R[rows_C]).astype(np.int32)
    return changed_R[~first_R], again_C if again_C.any() else again_C[:0]


def session_firsts(session_R: IntArray) -> BoolArray:
    """Whether a row is the first of its session."""
    first_R = np.ones(len(session_R), np.bool_)
    np.not_equal(session_R[1:], session_R[:-1], out=first_R[1:])
    return first_R


def choose_encoding(rows: pa.Table, schema: Schema) -> Encoding:
    """The encoding that suits `rows`: whole sessions, sorted."""
    session_R = rows.column("session_id").to_numpy()
    proposed: dict[str, list[str]] = {}
    for feature in schema.features:
        proposed.setdefault(f"group/{feature.group}" if feature.group else feature.name, []).append(feature.name)
    chosen: list[tuple[list[str], IntArray]] = []  # features that share an inverse, and the inverse
    for own in proposed.values():
        columns = {name: Column.of(rows, name) for name in own}
        found = {name: dedup_in_sessions(session_R, [column]) for name, column in columns.items()}
        for names, unique_U, inverse_R in join_alike((name, *found[name]) for name in own):
            spare_bits = sum(_spare_bits(columns[name], found[name][0]) for name in names)
            if not any(schema.feature(name).shift for name in names) and not _pays(
                unique_U, inverse_R, session_firsts(session_R), spare_bits
            ):
                continue
            # No inverse is stored twice, even for features of different groups.
            same = next((names for names, other_R in chosen if np.array_equal(other_R, inverse_R)), None)
            if same is None:
                chosen.append((names, inverse_R))
            else:
                same += names
    features = {feature.name: FeatureEncoding() for feature in schema.features}
    for names, _ in chosen:
        for name in names:
            features[name] = FeatureEncoding(group=names[0], windows=schema.feature(name).shift)
    return Encoding(features=features)


def _spare_bits(column: Column, unique_U: IntArray) -> float:
    """How many bits an inverse may take if storing the distinct lists of a feature is to pay."""
    distinct, _ = column.take(unique_U)
    return entropy_bits(distinct) * (MAX_SHARE * len(column.values) - len(distinct))


def _pays(unique_U: IntArray, inverse_R: IntArray, first_R: BoolArray, spare_bits: float) -> bool:
    if len(inverse_R) >= ALWAYS_FACTOR * (1 + np.count_nonzero(np.diff(inverse_R))):
        return True
    events = inverse_events(unique_U, inverse_R, first_R)
    return sum(len(stored) * entropy_bits(stored) for stored in events if len(stored)) <= spare_bits


def entropy_bits(values: npt.NDArray[Any]) -> float:
    """The entropy in bits per value: a lower bound for any code without context."""
    counts = np.unique(values, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def record_schema(schema: Schema, encoding: Encoding) -> pa.Schema:
    """The Arrow schema of the records. Nothing is nullable, so Parquet stores no levels for missing values."""
    columns: dict[str, pa.DataType] = {"session_id": pa.int64(), **_columns_of_times(encoding.times)}
    columns |= {"session/num_rows": pa.int32(), **dict.fromkeys(schema.labels, pa.float32())}
    for group in encoding.groups:
        columns |= {f"{group}/changed": pa.bool_(), f"{group}/again": pa.int32()}
    for feature in schema.features:
        columns |= _columns_of_feature(feature, encoding.features[feature.name])
    return pa.schema([pa.field(name, lists_of(kind), nullable=False) for name, kind in columns.items()])


def _columns_of_times(times: TimeEncoding) -> dict[str, pa.DataType]:
    columns: dict[str, pa.DataType] = {"timestamp/still": pa.int64()} if times.split_by else {}
    for name, is_coded in (("timestamp/first", times.first_coded), ("timestamp/gaps", times.gaps_coded)):
        columns |= {name: pa.uint8(), f"{name}/rest": pa.uint8()} if is_coded else {name: pa.int64()}
    return columns


def _columns_of_feature(feature: Feature, own: FeatureEncoding) -> dict[str, pa.DataType]:
    """The columns of the feature itself, without those of its group."""
    if feature.kind == "dense":
        return {feature.name: pa.int32()}
    columns = {f"{feature.name}/lengths": pa.int32()}
    if own.windows:
        columns |= {f"{feature.name}/first_ends": pa.int32()} if own.splits_ends else {}
        columns[f"{feature.name}/ends"] = pa.int32()
    if not own.shared_by:
        columns[feature.name] = pa.uint8() if own.coded else pa.int64()
        if own.coded:
            columns[f"{feature.name}/rest"] = pa.uint8()
    if own.follows:
        columns[f"{feature.name}/follows"] = pa.bool_()
    return columns


def columns_of(name: str, schema: Schema, encoding: Encoding) -> list[str]:
    """The columns of the records from which the rows' column `name` is decoded, besides the first label."""
    if name in schema.labels:
        return [name, "session/num_rows"]
    if name == "session_id":
        return ["session_id"]
    if name == "timestamp":
        group = encoding.times.split_by
        inverse = ["session/num_rows", f"{group}/changed", f"{group}/again"] if group else []
        return ["session_id", *_columns_of_times(encoding.times), *inverse]
    own = encoding.features[name]
    columns = [f"{own.group}/changed", f"{own.group}/again"] if own.group else []
    columns += _columns_of_feature(schema.feature(name), own)
    others = [other for other in (own.shared_by, own.follows) if other]
    return columns + [column for other in others for column in columns_of(other, schema, encoding)]


def lists_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))
