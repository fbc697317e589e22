"""What the columns of an interaction log mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from recmill.artifacts import (
    FORMAT_VERSION,
    InputError,
    check_format_version,
    dump_json,
    join_path,
    read_json,
    read_record,
    write_text_atomically,
)
from recmill.data.transforms import check_transform

KINDS = ("dense", "sparse", "sequence")
POOLINGS = ("sum", "mean", "none", "attention")
SIDES = ("", "user", "candidate")
KEY_COLUMNS = ("session_id", "timestamp", "label")  # names that no feature may have
DEFAULT_LABELS = ("label",)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One column of the log: a dense value, a list of ids that is pooled, or a sequence of ids that is encoded."""

    name: str
    kind: str
    table: str = ""  # features that name the same table share its embeddings; "" means the feature's own table
    num_rows: int = 0  # ids lie in [0, num_rows)
    dim: int = 0
    pooling: str = ""  # "" means sum for sparse, attention for sequence
    group: str = ""  # features of one group change together in a session; "" means no group
    shift: bool = False  # the list is a history: it loses ids at one end and gains ids at the other
    target: str = ""  # the sparse feature that sequence_encoder=din weighs the list for; "": the one of the same table
    side: str = (
        ""  # of a request to the served model: "user", once for all candidates, or "candidate"; "": export decides
    )
    # Preprocessing by the reader (transforms.py), after which ids are below num_rows.
    transforms: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        if not self.name:
            raise InputError("a feature's name must be a non-empty string")
        if self.name in KEY_COLUMNS:
            raise InputError(f"{where}: the name belongs to a key column ({', '.join(KEY_COLUMNS)})")
        if "/" in self.name or "/" in self.table:
            raise InputError(f"{where}: names of features and tables must not contain '/' (they name files)")
        if self.kind not in KINDS:
            raise InputError(f"{where}: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.side not in SIDES:
            raise InputError(f"{where}: side is {self.side!r}, expected 'user' or 'candidate'")
        for step in self.transforms:
            check_transform(step, is_dense=self.kind == "dense", where=where)
        if self.target and self.kind != "sequence":
            raise InputError(f"{where}: only a sequence feature has a target, received {self.target!r}")
        if self.kind == "dense":
            return
        if self.num_rows < 1 or self.dim < 1:
            raise InputError(f"{where}: num_rows and dim must be at least 1, received {self.num_rows} and {self.dim}")
        object.__setattr__(self, "table", self.table or self.name)
        object.__setattr__(self, "pooling", self.pooling or ("sum" if self.kind == "sparse" else "attention"))
        if self.pooling not in POOLINGS:
            raise InputError(f"{where}: pooling is {self.pooling!r}, expected one of {', '.join(POOLINGS)}")
        if self.kind == "sparse" and self.pooling not in ("sum", "mean"):
            raise InputError(f"{where}: a sparse feature is pooled by sum or mean, received {self.pooling!r}")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One embedding table and the features that read it."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The features of a log. Every log also has `session_id`, `timestamp` (ms) and the labels, which are not features.

    `labels` names the columns that a model predicts; the first is the main one, whose metrics come first everywhere.

    `user` and `item` name the sparse features that hold the one id of the user and of the item, if the log has them:
    metrics are then also computed per user, and for new, rare and frequent users and items.
    `splits` maps the name of a held-out split to the time (ms) at which its first session starts:
    {"valid": 1700, "test": 1900} means train < 1700 <= valid < 1900 <= test. Empty means that the data names no split.
    `info` holds facts about the data for reports, such as the best reachable AUC of a synthetic log.
    """

    features: tuple[Feature, ...]
    labels: tuple[str, ...] = DEFAULT_LABELS
    user: str = ""
    item: str = ""
    splits: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.features]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"feature {name!r} is listed {names.count(name)} times")
        if not self.features:
            raise InputError("the schema lists no features")
        shapes: dict[str, tuple[Feature, tuple[int, int]]] = {}
        for feature in self.id_features:
            first, shape = shapes.setdefault(feature.table, (feature, (feature.num_rows, feature.dim)))
            if shape != (feature.num_rows, feature.dim):
                raise InputError(
                    f"table {feature.table!r}: {first.name!r} says {shape[0]} rows of {shape[1]}, "
                    f"{feature.name!r} says {feature.num_rows} of {feature.dim}"
                )
        for table in self.tables:
            poolings = {self.feature(name).pooling for name in table.features}
            if len(poolings) > 1 and table.name not in self.sequence_tables:
                raise InputError(f"table {table.name!r}: its features pool differently ({', '.join(sorted(poolings))})")
        for feature in self.sequence:
            if feature.target:
                self.target_of(feature)
        if "train" in self.splits or not all(type(time) is int for time in self.splits.values()):
            raise InputError(f"splits must map names other than 'train' to times in ms, received {dict(self.splits)}")
        if len(set(self.splits.values())) < len(self.splits):
            raise InputError(f"splits must start at different times, received {dict(self.splits)}")
        self._check_labels()
        for role in ("user", "item"):
            named = getattr(self, role)
            if named and named not in {feature.name for feature in self.sparse}:
                raise InputError(f"{role} is {named!r}, expected the name of a sparse feature")
        # JSON objects have no order, so the times define it.
        object.__setattr__(self, "splits", dict(sorted(self.splits.items(), key=lambda entry: entry[1])))

    def _check_labels(self) -> None:
        labels = list(self.labels) if isinstance(self.labels, list | tuple) else []
        if not labels or not all(isinstance(name, str) and name for name in labels) or len(set(labels)) < len(labels):
            raise InputError(f"labels must be a list of distinct column names, received {self.labels!r}")
        taken = {"session_id", "timestamp", *(feature.name for feature in self.features)}
        for name in labels:
            if name in taken or "/" in name:
                raise InputError(f"label {name!r}: the name belongs to another column, or contains '/'")
        object.__setattr__(self, "labels", tuple(labels))

    @property
    def dense(self) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.kind == "dense")

    @property
    def sparse(self) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.kind == "sparse")

    @property
    def sequence(self) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.kind == "sequence")

    @property
    def id_features(self) -> tuple[Feature, ...]:
        """Every feature that reads an embedding table, in schema order."""
        return tuple(feature for feature in self.features if feature.kind != "dense")

    @property
    def tables(self) -> tuple[Table, ...]:
        readers: dict[str, list[Feature]] = {}
        for feature in self.id_features:
            readers.setdefault(feature.table, []).append(feature)
        return tuple(
            Table(name=name, num_rows=group[0].num_rows, dim=group[0].dim, features=tuple(f.name for f in group))
            for name, group in readers.items()
        )

    @property
    def sequence_tables(self) -> frozenset[str]:
        """Tables that some sequence feature reads: looked up row by row, not pooled in the lookup."""
        return frozenset(feature.table for feature in self.sequence)

    def select(self, names: Iterable[str]) -> Schema:
        """The schema with these features only; what names another feature is dropped."""
        kept = list(names)
        features = [self.feature(name) for name in kept]
        features = [f if f.target in ("", *kept) else replace(f, target="") for f in features]
        roles = {role: own for role in ("user", "item") if (own := getattr(self, role)) in kept}
        return Schema(features=tuple(features), labels=self.labels, splits=self.splits, info=self.info, **roles)

    def feature(self, name: str) -> Feature:
        for feature in self.features:
            if feature.name == name:
                return feature
        raise InputError(f"unknown feature {name!r}; the schema has {', '.join(f.name for f in self.features)}")

    def target_of(self, feature: Feature) -> Feature:
        """The sparse feature whose vector weighs the elements of a sequence: its `target`, or the one of its table."""
        where = f"feature {feature.name!r}"
        if feature.target:
            found = self.feature(feature.target)
            if found.kind != "sparse" or found.dim != feature.dim:
                raise InputError(f"{where}: target {found.name!r} must be a sparse feature of dim {feature.dim}")
            return found
        candidates = [other for other in self.sparse if other.table == feature.table]
        if len(candidates) != 1:
            received = ", ".join(other.name for other in candidates) or "none"
            raise InputError(
                f"{where}: expected one sparse feature of table {feature.table!r} as its target, found {received}; "
                "name one with 'target' in the schema"
            )
        return candidates[0]

    @property
    def columns(self) -> list[str]:
        """Every column of the log: session and time, the labels, then the features in schema order."""
        return ["session_id", "timestamp", *self.labels, *(feature.name for feature in self.features)]

    def arrow_schema(self) -> pa.Schema:
        """The column types we write. Readers also accept a plain int64 column for a sparse feature."""
        types = {"dense": pa.float32(), "sparse": pa.list_(pa.int64()), "sequence": pa.list_(pa.int64())}
        return pa.schema(
            [
                pa.field("session_id", pa.int64()),
                pa.field("timestamp", pa.int64()),
                *(pa.field(name, pa.float32()) for name in self.labels),
                *(pa.field(feature.name, types[feature.kind]) for feature in self.features),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"format_version": FORMAT_VERSION, "features": [_feature_json(f) for f in self.features]}
        if self.labels != DEFAULT_LABELS:
            body["labels"] = list(self.labels)
        body |= {role: name for role in ("user", "item") if (name := getattr(self, role))}
        if self.splits:
            body["splits"] = dict(self.splits)
        if self.info:
            body["info"] = dict(self.info)
        return body

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any], *, where: str = "schema") -> Self:
        check_format_version(loaded, where)
        listed, known = loaded.get("features"), {entry.name for entry in fields(Feature)}
        if not isinstance(listed, list):
            raise InputError(f"{where}: 'features' must be a list, found {type(listed).__name__}")
        features = []
        for position, entry in enumerate(listed):
            key = f"features[{position}]"
            if isinstance(entry, dict) and (unknown := sorted(set(entry) - known)):
                raise InputError(f"{where}: {key} ({entry.get('name')}) has unknown keys {', '.join(unknown)}")
            features.append(read_record(Feature, entry, where=where, key=key))
        for key in ("splits", "info"):
            if not isinstance(loaded.get(key, {}), dict):
                raise InputError(f"{where}: {key!r} must be an object, found {loaded[key]!r}")
        optional = {key: loaded[key] for key in ("labels", "user", "item", "splits", "info") if key in loaded}
        try:
            return cls(features=tuple(features), **optional)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read `schema.json`, given as the file or its folder."""
        file = str(path) if str(path).endswith(".json") else join_path(path, "schema.json")
        return cls.from_json(read_json(file), where=file)

    def save(self, path: str | Path) -> None:
        """Write `schema.json`, given as the file or its folder."""
        file = str(path) if str(path).endswith(".json") else join_path(path, "schema.json")
        write_text_atomically(file, dump_json(self.to_json()))


def _feature_json(feature: Feature) -> dict[str, Any]:
    entry = asdict(feature)
    for name in ("transforms", "target", "side"):  # most features have none
        if not entry[name]:
            del entry[name]
    return entry
