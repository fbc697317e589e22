"""Vocabularies: which row of a table each value has. The folder goes with the log, dataset, checkpoint and export.

    vocabulary/vocabulary.json    version, hash and ancestors of the map, and what is new in each table
    vocabulary/<table>.parquet    value, row, count (in this log), since (version that gave the row), last_seen (ms)

Rows come first in their order, then values without a row of their own (row 0), which are rare.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, join_path, read_checked_json, read_record, record_json
from recmill.artifacts.places.columns import read_numbers
from recmill.data.dense_values import DenseValues
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.schema import Schema

MAP_FILE = "vocabulary.json"
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
HASH_DIGITS = 15  # hexadecimal digits of the MD5 sum of a value as text: they fit int64


@dataclass(frozen=True, kw_only=True)
class TableMap:
    """What is known about the rows of one table, and how much of them is new in this version."""

    num_rows: int
    hashed: bool = False  # all values are hashed: there is no file
    rare_rows: int = 0  # rows 1 to this are for rare and unknown values, by their hash; 0: those share row 0
    num_values: int = 0  # values with a row of their own
    num_rare: int = 0
    rare_share: float = 0.0  # of reads, in this log
    num_new: int = 0  # values that got their row in this version: unknown to models trained before
    new_share: float = 0.0  # of reads, in this log
    num_reused: int = 0  # new values whose row belonged to a retired one
    num_retired: int = 0
    sha256: str | None = None  # of the file; None: hashed, or written by a recmill that kept no hash

    def check_file(self, path: str) -> None:
        """Raise unless the table's file is the one that this map was written with, and holds a row for each value."""
        if self.sha256 is not None:
            self._check_hash(path)
        read_numbers(path, ("row", "count", "since"), below=self.num_rows)
        with fsspec.open(path, "rb") as stored, pq.ParquetFile(stored) as file:
            types = {field.name: field.type for field in file.schema_arrow}
        value, last_seen = (types.get(name, pa.null()) for name in ("value", "last_seen"))
        if not pa.types.is_integer(last_seen):
            raise InputError(f"{path}: has no column 'last_seen' of whole numbers")
        if not (pa.types.is_integer(value) or pa.types.is_string(value)):
            raise InputError(f"{path}: has no column 'value' of whole numbers or texts")

    def _check_hash(self, path: str) -> None:
        try:
            with fsspec.open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise InputError(f"{path}: no such file, though {MAP_FILE} lists it") from None
        if f"sha256:{found}" != self.sha256:
            raise InputError(f"{path}: its content is not what {MAP_FILE} recorded")


@dataclass(frozen=True, kw_only=True)
class VocabularyMap:
    """A version of the map from values to rows of all tables. `ancestors` are the hashes that it extends."""

    version: int
    hash: str
    ancestors: tuple[str, ...] = ()
    tables: Mapping[str, TableMap]
    dense: Mapping[str, DenseValues] = field(default_factory=dict)  # by feature: what numbers become

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = record_json(self)
        return found

    @classmethod
    def from_json(cls, loaded: Any, *, where: str) -> Self:
        return read_record(cls, loaded, where=where)

    @classmethod
    def of(cls, schema: Schema, *, where: str) -> Self | None:
        """The map that the rows of a schema follow; None if no `recmill prepare` made them."""
        found = schema.info.get("vocabulary")
        return None if found is None else cls.from_json(found, where=where)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The map of a log, dataset, checkpoint or exported model."""
        path = join_path(folder, f"{VOCABULARY_FOLDER}/{MAP_FILE}")
        filesystem, root = fsspec.core.url_to_fs(path)
        if not filesystem.exists(root):
            raise InputError(f"{folder}: holds no {VOCABULARY_FOLDER}/{MAP_FILE}; expected a log from recmill prepare")
        # Maps of an older recmill have no checksum; a damaged key of one is refused as unknown.
        loaded = read_checked_json(path, may_lack_checksum=True)
        return read_record(cls, loaded, where=path, is_strict=True)

    def extends(self, older: VocabularyMap) -> bool:
        return older.hash == self.hash or older.hash in self.ancestors


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The rows of one table by value: `Vocabulary.load("run/train/checkpoint", "item").rows(["sku-1", "sku-2"])`."""

    values: pa.Array  # with a row of their own
    own_rows: np.ndarray
    since: np.ndarray  # version of the map that gave the row
    rare_rows: int = 0

    @classmethod
    def load(cls, folder: str | Path, table: str) -> Self:
        """The vocabulary of a table, from the folder of a log, dataset, checkpoint or exported model."""
        known = VocabularyMap.load(folder).tables
        if table not in known or known[table].hashed:
            listed = ", ".join(name for name, own in known.items() if not own.hashed) or "none"
            raise InputError(f"{folder}: has no vocabulary of table {table!r}, only of {listed}")
        path = join_path(folder, f"{VOCABULARY_FOLDER}/{table}.parquet")
        known[table].check_file(path)
        try:
            with fsspec.open(path, "rb") as file:
                found = pq.read_table(file, columns=["value", "row", "since"])
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from None
        found = found.filter(pc.greater(found["row"], 0))
        return cls(
            values=found["value"].combine_chunks(),
            own_rows=found["row"].to_numpy(),
            since=found["since"].to_numpy(),
            rare_rows=known[table].rare_rows,
        )

    def rows(self, values: Iterable[Any]) -> np.ndarray:
        """The row of each value; None has row 0, a value without its own row has row 0 or a row by its hash."""
        texts = [self._as_read(value) for value in values]
        places = self._places(texts)
        is_known = places.is_valid().to_numpy(zero_copy_only=False)
        found = np.zeros(len(texts), np.int64)
        found[is_known] = self.own_rows[places.drop_null().to_numpy()]
        if self.rare_rows:
            for place in np.flatnonzero(~is_known):
                found[place] = hash_value(texts[place], self.rare_rows + 1)
        return found

    def count_unknown(self, values: Iterable[Any]) -> int:
        """How many of the values have no row of their own."""
        return int((~self.are_known(values)).sum())

    def are_known(self, values: Iterable[Any]) -> np.ndarray:
        """Whether each value has a row of its own."""
        found: np.ndarray = self._places([self._as_read(value) for value in values]).is_valid().to_numpy(False)
        return found

    def _as_read(self, value: Any) -> str | None:
        text = text_of(value)
        if text is None or not pa.types.is_integer(self.values.type) or not WHOLE_NUMBER.fullmatch(text):
            return text
        return str(int(text))  # a column of numbers has 7 for 007

    def _places(self, texts: Sequence[str | None]) -> pa.Array:
        """Where the values are among `self.values`; null for a value without a row of its own."""
        asked: Sequence[Any] = texts
        if pa.types.is_integer(self.values.type):
            asked = [int(text) if text and _is_int64(text) else None for text in texts]
        return pc.index_in(pa.array(asked, type=self.values.type), value_set=self.values)


def text_of(value: Any) -> str | None:
    """A value as preparation reads it, as text: 7.0 and True are whole numbers, None and NaN are missing."""
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return None
    if isinstance(value, bool | np.bool_) or (isinstance(value, float | np.floating) and float(value).is_integer()):
        return str(int(value))
    return str(value)


def _is_int64(text: str) -> bool:
    return WHOLE_NUMBER.fullmatch(text) is not None and -(2**63) <= int(text) < 2**63


def hash_value(value: Any, num_rows: int) -> int:
    """1 + the first digits of the MD5 sum of the value as text, modulo `num_rows` - 1; 0 for a missing one."""
    text = text_of(value)
    if text is None:
        return 0
    digits = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:HASH_DIGITS]
    return int(digits, 16) % (num_rows - 1) + 1


def hash_map(tables: Mapping[str, pa.Table], fixed: Mapping[str, Sequence[int]]) -> str:
    """A hash over values and rows of all tables (in row order), and over the numbers of hashed rows."""
    digest = hashlib.sha256(repr(sorted(fixed.items())).encode())
    for name, table in sorted(tables.items()):
        digest.update(f"{name} {table.num_rows} {table.schema.field('value').type}\0".encode())
        for column in ("row", "value"):
            array = pa.concat_arrays(table[column].chunks) if table.num_rows else table[column].combine_chunks()
            for buffer in array.buffers()[1:] if table.num_rows else ():
                digest.update(np.frombuffer(buffer, np.uint8).tobytes())
    return f"sha256:{digest.hexdigest()}"


def copy_vocabulary(source: str | Path, folder: Path) -> None:
    """Copy the vocabulary of `source`, if it has one, into an artifact's folder that is being written."""
    filesystem, root = fsspec.core.url_to_fs(join_path(source, VOCABULARY_FOLDER))
    if not filesystem.isdir(root):
        return
    (folder / VOCABULARY_FOLDER).mkdir()
    for path in filesystem.ls(root, detail=False):
        with (
            filesystem.open(path, "rb") as opened,
            open(folder / VOCABULARY_FOLDER / os.path.basename(path), "wb") as copy,
        ):
            shutil.copyfileobj(opened, copy)


def check_growth(old: Schema, new: Schema, *, checkpoint: str, data: str) -> None:
    """Raise unless a model of schema `old` can go on with data of schema `new`: same features, tables not smaller."""
    check_features(old, new, checkpoint=checkpoint, data=data)
    sizes = {table.name: table.num_rows for table in old.tables}
    for table in new.tables:
        if table.num_rows < sizes[table.name]:
            raise InputError(
                f"{data}: table {table.name!r} has {table.num_rows:,} rows, fewer than the "
                f"{sizes[table.name]:,} that {checkpoint} was trained with"
            )
    _check_maps(VocabularyMap.of(old, where=checkpoint), VocabularyMap.of(new, where=data), checkpoint, data)


def check_features(old: Schema, new: Schema, *, checkpoint: str, data: str) -> None:
    """Raise unless data of schema `new` has the features and labels of a model of schema `old`, whatever its rows."""
    trained, given = ({feature.name: feature for feature in schema.features} for schema in (old, new))
    for name in trained:
        if name not in given:
            raise InputError(f"{data}: has no feature {name!r}, which {checkpoint} was trained with")
    for name in given:
        if name not in trained:
            raise InputError(f"{data}: feature {name!r} is new, {checkpoint} was trained without it")
    if list(trained) != list(given):
        raise InputError(f"{data}: its features are ordered {', '.join(given)}, those of {checkpoint} otherwise")
    for name, feature in given.items():
        for key in ("kind", "table", "dim", "pooling", "target", "transforms"):
            before, now = getattr(trained[name], key), getattr(feature, key)
            if before != now:
                raise InputError(
                    f"{data}: feature {name!r} has {key} {now!r}, {checkpoint} was trained with {before!r}"
                )
    if old.labels != new.labels:
        raise InputError(
            f"{data}: its labels are {', '.join(new.labels)}, those of {checkpoint} {', '.join(old.labels)}"
        )


def _check_maps(old: VocabularyMap | None, new: VocabularyMap | None, checkpoint: str, data: str) -> None:
    if old is None and new is None:
        return
    if old is None or new is None:
        having, lacking = (data, checkpoint) if old is None else (checkpoint, data)
        raise InputError(f"{having}: has a vocabulary and {lacking} has none: their rows have different meanings")
    if not new.extends(old):
        raise InputError(
            f"{data}: its vocabulary (version {new.version}) does not extend that of {checkpoint} (version "
            f"{old.version}): prepare it with recmill prepare --vocabulary and the log that the model was trained on"
        )


def reused_rows(data: str | Path, old: Schema, new: Schema) -> dict[str, np.ndarray]:
    """Rows of `old`'s tables that belong to other values in `data`, by table, ascending."""
    before, now = VocabularyMap.of(old, where="checkpoint"), VocabularyMap.of(new, where=str(data))
    if before is None or now is None:
        return {}
    found = {}
    for name, own in now.tables.items():
        if not own.hashed and name in before.tables and any(table.name == name for table in old.tables):
            vocabulary = Vocabulary.load(data, name)
            is_reused = (vocabulary.since > before.version) & (vocabulary.own_rows < before.tables[name].num_rows)
            if is_reused.any():
                found[name] = np.sort(vocabulary.own_rows[is_reused])
    return found
