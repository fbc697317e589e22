"""Rows of a model for data whose vocabulary is of another version: ids that are new to the model get its unknown row.

data:   rows 1 a, 2 b, 3 d (3 was c's, who retired), 4 e        model:   rows 1 a, 2 b, 3 c
ids of the data  [1, 3, 4, 0]  ->  rows of the model  [1, 0, 0, 0]; two of four reads are new to the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.artifacts import InputError
from recmill.data.ikjt.batch import Batch
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary, VocabularyMap, check_features


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRows:
    """By table of `schema` whose rows differ: the model's row of each row of the data, and whether it is new."""

    schema: Schema
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    is_new: Mapping[str, Tensor] = field(default_factory=dict)

    def translate(self, ids: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, dict[str, tuple[int, int]]]:
        """Ids as rows of the model, and by table how many ids were read and how many of them are new to the model."""
        if not self.rows:
            return ids, {}
        values, ends = ids.values().clone(), ids.offset_per_key()
        counts: dict[str, tuple[int, int]] = {}
        for position, name in enumerate(ids.keys()):
            table = self.schema.feature(name).table
            if table in self.rows:
                own = values[ends[position] : ends[position + 1]]
                num_read, num_new = counts.get(table, (0, 0))
                counts[table] = num_read + len(own), num_new + int(self.is_new[table][own].sum())
                own.copy_(self.rows[table][own])
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths(), stride=ids.stride()), counts

    def translate_batch(self, batch: Batch) -> tuple[Batch, dict[str, tuple[int, int]]]:
        """The batch with ids as rows of the model, and the counts of `translate`."""
        if not self.rows:
            return batch, {}
        ids, counts = self.translate(batch.ids)
        return replace(batch, ids=ids), counts


def find_known_rows(model: str | Path, trained: Schema, data: str | Path, schema: Schema) -> KnownRows:
    """What `model`, trained with the schema `trained`, knows of the rows of `data`; raises if these have no relation.

    Data of the same vocabulary reads the same rows. Of another version, before or after the model's, each value of the
    data gets the row that it has in the model's vocabulary: its own, a row by its hash, or row 0.
    """
    check_features(trained, schema, checkpoint=str(model), data=str(data))
    mine, theirs = VocabularyMap.of(trained, where=str(model)), VocabularyMap.of(schema, where=str(data))
    if (mine is None) != (theirs is None):
        having, lacking = (data, model) if mine is None else (model, data)
        raise InputError(f"{having}: has a vocabulary and {lacking} has none: their rows have different meanings")
    sizes, wanted = ({table.name: table.num_rows for table in own.tables} for own in (trained, schema))
    if mine is None or theirs is None:
        for name, size in wanted.items():
            if size != sizes[name]:
                raise InputError(
                    f"{data}: table {name!r} has {size:,} rows, that of {model} {sizes[name]:,}, and no vocabulary "
                    "says which ids the model knows"
                )
        return KnownRows(schema=schema)
    if mine.hash == theirs.hash and sizes == wanted:
        return KnownRows(schema=schema)
    if not (theirs.extends(mine) or mine.extends(theirs)):
        raise InputError(
            f"{data}: its vocabulary (version {theirs.version}) and that of {model} (version {mine.version}) have "
            "nothing in common: prepare the log with recmill prepare --vocabulary and the log the model was trained on"
        )
    rows, is_new = {}, {}
    for table in schema.tables:
        if table.name not in theirs.tables or theirs.tables[table.name].hashed:
            continue
        own, known = Vocabulary.load(data, table.name), Vocabulary.load(model, table.name)
        values = own.values.to_pylist()
        found, unknown = np.arange(table.num_rows), np.zeros(table.num_rows, bool)
        found[theirs.tables[table.name].rare_rows + 1 :] = 0  # of values that were retired
        found[own.own_rows], unknown[own.own_rows] = known.rows(values), ~known.are_known(values)
        rows[table.name], is_new[table.name] = torch.from_numpy(found), torch.from_numpy(unknown)
    return KnownRows(schema=schema, rows=rows, is_new=is_new)


@dataclass(kw_only=True)
class NewReads:
    """How many ids were read, and how many of them were new to the model, by table."""

    tables: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, counts: Mapping[str, tuple[int, int]]) -> None:
        for name, (num_read, num_new) in counts.items():
            before = self.tables.get(name, (0, 0))
            self.tables[name] = before[0] + num_read, before[1] + num_new

    def to_json(self) -> dict[str, Any]:
        return {name: {"reads": read, "new": new} for name, (read, new) in self.tables.items()}


def describe_new_reads(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """One line per table whose vocabulary is of another version than the model's."""
    return [
        f"{name}: {own['new']:,} of {own['reads']:,} reads ({own['new'] / max(1, own['reads']):.1%}) are of ids that "
        "the model does not know"
        for name, own in found.items()
    ]
