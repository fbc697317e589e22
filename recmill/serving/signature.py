"""What a request model takes and returns, and the manifest of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from recmill.artifacts import Artifact, InputError
from recmill.data.schema import Schema

REQUEST_FOLDER = "request"  # in an exported model
Side = Literal["user", "candidate"]
TableForm = Literal["float32", "bf16", "int8", "int4"]
MAX_CHECKED_BYTES = 4 * 2**30  # of mapped files that are hashed when a model is loaded: 0.7 s of CPU time per GiB
TABLE_FORMS: tuple[TableForm, ...] = ("float32", "bf16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """An embedding table as rows of bytes in a file of its own, which can be mapped into memory.

    Row r is at place `order[r]` of the file if there is an order: the most read rows first.
    """

    file: str
    form: TableForm
    num_rows: int
    dim: int
    row_bytes: int
    order_file: str = ""  # one int32 per row
    hot_rows: int = 0  # the first rows of the file, which are read the most


@dataclass(frozen=True, kw_only=True)
class StoredSharing:
    """The one array of all tables that share parameters; "numbers" of `tables_file` describes them in this order."""

    array_file: str
    form: Literal["float32", "int8"]
    num_slots: int
    size: int
    block_size: int
    seed: int
    tables: tuple[str, ...]
    tables_file: str  # safetensors: numbers [tables, 8], exact_ids; of int8 arrays also exponents


@dataclass(frozen=True, kw_only=True)
class RequestManifest(Artifact):
    """request.json: a model for requests. Tables are mapped; those of a large model are only checked by `verify`."""

    kind: ClassVar[str] = "request_model"
    manifest_name: ClassVar[str] = "request.json"

    schema: Mapping[str, Any]
    config: Mapping[str, Any]  # of the ranker
    user_features: tuple[str, ...]
    user_features_from: str
    table_form: TableForm
    dense_file: str
    tables: Mapping[str, StoredTable]
    sharing: StoredSharing | None = None

    @property
    def mapped_files(self) -> frozenset[str]:
        mapped = {name for table in self.tables.values() for name in (table.file, table.order_file) if name}
        return frozenset(mapped | ({self.sharing.array_file} if self.sharing else set()))

    def named_files(self) -> frozenset[str]:
        return self.mapped_files | {self.dense_file} | ({self.sharing.tables_file} if self.sharing else set())

    def checked_by_readers(self) -> frozenset[str]:
        """Mapped files, where they are too large to be read before the first request; `verify` reads them."""
        total = sum(entry.bytes for entry in self.files if entry.name in self.mapped_files)
        return self.mapped_files if total > MAX_CHECKED_BYTES else frozenset()

    @property
    def signature(self) -> Signature:
        return Signature.of(
            Schema.from_json(self.schema, where=f"{self.path}/{self.manifest_name}"),
            user_features=frozenset(self.user_features),
            user_features_from=self.user_features_from,
            max_sequence_length=int(self.config["max_sequence_length"]),
            version=self.content_hash,
        )


@dataclass(frozen=True, kw_only=True)
class RequestFeature:
    """A feature with ids: on which side it is given, and which ids and lengths are allowed."""

    name: str
    side: Side
    kind: Literal["sparse", "sequence"]
    table: str
    num_rows: int  # ids lie in [0, num_rows)
    max_length: int | None  # longer sequences keep this many of their last elements; None: all elements count


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a request consists of. `version` is the content hash of the model's folder.

    `dense_user` and `dense_candidate` give the order of the columns of the dense values of each side.
    `user_features_from` says how it was decided which features are the user's.
    """

    features: tuple[RequestFeature, ...]
    dense_user: tuple[str, ...]
    dense_candidate: tuple[str, ...]
    labels: tuple[str, ...]
    version: str
    user_features_from: str
    user: str = ""  # the sparse feature that holds the user's id, if the log has one
    item: str = ""

    @classmethod
    def of(
        cls,
        schema: Schema,
        *,
        user_features: frozenset[str],
        user_features_from: str,
        max_sequence_length: int,
        version: str,
    ) -> Signature:
        features = tuple(
            RequestFeature(
                name=feature.name,
                side="user" if feature.name in user_features else "candidate",
                kind="sequence" if feature.kind == "sequence" else "sparse",
                table=feature.table,
                num_rows=feature.num_rows,
                max_length=max_sequence_length if feature.kind == "sequence" else None,
            )
            for feature in schema.id_features
        )
        return cls(
            features=features,
            dense_user=tuple(f.name for f in schema.dense if f.name in user_features),
            dense_candidate=tuple(f.name for f in schema.dense if f.name not in user_features),
            labels=schema.labels,
            version=version,
            user_features_from=user_features_from,
            user=schema.user,
            item=schema.item,
        )

    @cached_property
    def _sides(self) -> Mapping[Side, tuple[RequestFeature, ...]]:
        sides: tuple[Side, ...] = ("user", "candidate")
        return {side: tuple(feature for feature in self.features if feature.side == side) for side in sides}

    def of_side(self, side: Side) -> tuple[RequestFeature, ...]:
        """The features with ids of one side, in schema order."""
        return self._sides[side]

    def names_of_side(self, side: Side) -> tuple[str, ...]:
        return self._names[side]

    @cached_property
    def _names(self) -> Mapping[Side, tuple[str, ...]]:
        return {side: tuple(feature.name for feature in own) for side, own in self._sides.items()}

    def feature(self, name: str) -> RequestFeature:
        for feature in self.features:
            if feature.name == name:
                return feature
        raise InputError(f"unknown feature {name!r}; the model has {', '.join(f.name for f in self.features)}")
