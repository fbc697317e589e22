"""The exported program behind MLflow's model interface. Self-contained: a server needs torch, numpy and pandas only.

A model whose data has a vocabulary is asked with the values of the original data; pyarrow then reads the vocabulary.
`text_of` and `ServedValues` follow recmill/data/vocabulary.py, `dense_column` recmill/data/dense_values.py: tests
compare their results.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import zipfile
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd

if TYPE_CHECKING:
    import torch

WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")

NUMBER, NULL = (int, float), type(None)
DENSE = {"null_value": (*NUMBER, NULL), "transform": [str], "mean": NUMBER, "scale": NUMBER, "fill": NUMBER}
ID = {"name": str, "table": str, "num_rows": int, "max_length": int}
TABLE = {"num_hashed": int, "file": str, "sha256": str}
# What signature.json may hold: a type, [items], {"*": values of any name} or {name: value}.
SIGNATURE_TYPES = {"dense": [str], "labels": [str], "ids": [ID], "sha256": str}
SIGNATURE_TYPES |= {"dense_values": {"*": DENSE}, "tables": {"*": TABLE}}
MAY_BE_MISSING = ("*", "dense_values", "tables", "file", "sha256")


class RankingProgram(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Probabilities for the rows of a data frame: dense columns hold numbers, id columns an id or a list of ids.

    Ids are values as the original data has them where the model has a vocabulary, else rows of the tables; numbers are
    those of the original data as well, before transforms. A missing list of a sequence is empty; a missing id is the
    unknown one; a missing number is what log.yaml says.

    One number per row, or a data frame with one column per label if the model has several.
    """

    def load_context(self, context: Any) -> None:
        import torch  # not loaded by whoever only packages the model

        with open(context.artifacts["signature"], encoding="utf-8") as file:
            self.signature = json.load(file)
        checksum = self.signature.pop("checksum", None)
        text = json.dumps(self.signature, sort_keys=True)
        if checksum != "sha256:" + hashlib.sha256(text.encode()).hexdigest():
            raise ValueError(f"{context.artifacts['signature']}: was changed after it was written")
        check_types(self.signature, SIGNATURE_TYPES, context.artifacts["signature"])
        check_program(context.artifacts["program"], self.signature.get("sha256", ""))
        self.values = {
            name: ServedValues(entry, context.artifacts.get("vocabulary", ""))
            for name, entry in self.signature.get("tables", {}).items()
        }
        self.program = torch.export.load(context.artifacts["program"]).module()

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> np.ndarray | pd.DataFrame:
        import torch

        rules = self.signature.get("dense_values", {})
        dense = np.empty((len(model_input), len(self.signature["dense"])), dtype=np.float32)
        for place, name in enumerate(self.signature["dense"]):
            dense[:, place] = dense_column(model_input[name].tolist(), name, rules.get(name))
        ids = [self._ids_of(model_input[entry["name"]].tolist(), entry) for entry in self.signature["ids"]]
        with torch.no_grad():
            probabilities: np.ndarray = self.program(torch.from_numpy(dense), ids).numpy()
        if probabilities.ndim == 1:
            return probabilities
        return pd.DataFrame(probabilities, columns=self.signature["labels"], index=model_input.index)

    def _ids_of(self, cells: list[Any], entry: dict[str, Any]) -> torch.Tensor:
        lists = [cut_list(cell, entry) for cell in cells]
        flat = [value for own in lists for value in own]
        table = self.values.get(entry["table"]) if entry.get("takes") == "values" else None
        rows = as_rows(flat, entry) if table is None else table.rows(flat)
        return pad_ids(rows, np.array([len(own) for own in lists], dtype=np.int64), entry)


class ServedValues:
    """Rows of the values of one table, known by a vocabulary or by their hash, as `recmill prepare` gave them."""

    def __init__(self, entry: dict[str, Any], folder: str) -> None:
        self.num_hashed, self.known = entry["num_hashed"], pd.Index([])
        if "file" not in entry:
            return
        if os.path.basename(entry["file"]) != entry["file"]:
            raise ValueError(f"signature.json names {entry['file']!r}, expected a file of the vocabulary")
        path = os.path.join(folder, entry["file"])
        with open(path, "rb") as file:
            content = file.read()
        if "sha256:" + hashlib.sha256(content).hexdigest() != entry.get("sha256"):
            raise ValueError(f"{path}: is not the vocabulary that signature.json describes")
        found = pd.read_parquet(io.BytesIO(content), columns=["value", "row"])
        found = found[found["row"] > 0]
        self.own_rows = found["row"].to_numpy(dtype=np.int64)
        self.are_numbers = pd.api.types.is_integer_dtype(found["value"])
        self.known = pd.Index(found["value"] if self.are_numbers else found["value"].astype(object))

    def rows(self, values: list[Any]) -> np.ndarray:
        """The row of each value: its own, one by its hash, or 0."""
        texts = [text_of(value) for value in values]
        found = np.zeros(len(texts), dtype=np.int64)
        rest = np.ones(len(texts), dtype=bool)
        if len(self.known) and texts:
            if self.are_numbers:
                numbers = [int(text) if text and WHOLE_NUMBER.fullmatch(text) else None for text in texts]
                texts = [text if own is None else str(own) for own, text in zip(numbers, texts, strict=True)]
                asked = [own if own is not None and -(2**63) <= own < 2**63 else None for own in numbers]
                places = self.known.get_indexer(pd.array(asked, dtype="Int64"))
            else:
                places = self.known.get_indexer(pd.Index(texts, dtype=object))
            rest = places < 0
            found[~rest] = self.own_rows[places[~rest]]
        for place in np.flatnonzero(rest) if self.num_hashed else ():
            found[place] = hash_text(texts[place], self.num_hashed)
        return found


def text_of(value: Any) -> str | None:
    """A value as preparation reads it, as text: 7.0 and True are whole numbers, None and NaN are missing."""
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    is_float = isinstance(value, float | np.floating)
    if is_float and np.isnan(value):
        return None
    if isinstance(value, bool | np.bool_) or (is_float and float(value).is_integer()):
        return str(int(value))
    return str(value)


def hash_text(text: str | None, num_hashed: int) -> int:
    """A row from 1 to `num_hashed`; 0 for a missing value."""
    if text is None:
        return 0
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:15], 16) % num_hashed + 1


def dense_column(cells: list[Any], name: str, rules: dict[str, Any] | None) -> np.ndarray:
    """Numbers of the original data after nulls and transforms, as `recmill prepare` makes them; else as given."""
    try:
        numbers = np.array([np.nan if text_of(cell) is None else float(cell) for cell in cells], dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"feature {name!r}: expected numbers") from None
    if rules is None:
        return numbers
    is_null = ~np.isfinite(numbers)
    numbers[is_null] = 0.0 if rules["null_value"] is None else rules["null_value"]
    for step in rules["transform"]:
        is_log = step == "log1p"
        numbers = np.log1p(np.maximum(numbers, 0.0)) if is_log else (numbers - rules["mean"]) / rules["scale"]
    if rules["null_value"] is None:
        numbers[is_null] = rules["fill"]
    return numbers


def check_types(found: Any, expected: Any, where: str) -> None:
    """Raise unless a value of signature.json has its type, its keys, and finite numbers that fit into 64 bits."""
    kind = type(expected) if isinstance(expected, dict | list) else expected
    is_fine = isinstance(found, kind) and not isinstance(found, bool)
    if isinstance(found, int):
        is_fine &= abs(found) < 2**63
    elif isinstance(found, float):
        is_fine &= math.isfinite(found)
    if not is_fine:
        raise ValueError(f"{where} is {str(found)[:40]!r}, expected another type or range")
    if isinstance(expected, list):
        for place, own in enumerate(found):
            check_types(own, expected[0], f"{where}: [{place}]")
    elif isinstance(expected, dict):
        for name in expected:
            if name not in found and name not in MAY_BE_MISSING:
                raise ValueError(f"{where}: {name} is missing")
        for name, own in found.items():
            if "*" in expected or name in expected:
                check_types(own, expected.get("*", expected.get(name)), f"{where}: {name}")


def check_program(path: str, sha256: str) -> None:
    """Refuse a program that is not the one that was exported, or that could bring code: torch.export.load unpickles.

    Our programs keep weights as bytes; their one pickle, of sample inputs, loads with weights_only.
    """
    import torch

    with open(path, "rb") as file:
        if "sha256:" + hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(f"{path}: is not the program that signature.json describes")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json"):
                entries = json.loads(archive.read(name))["config"].values()
                if any(entry["use_pickle"] for entry in entries):
                    raise ValueError(f"{path}: holds pickled objects ({name}), expected weights as bytes")
            if "/data/sample_inputs/" in name:
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)


def cut_list(cell: Any, entry: dict[str, Any]) -> list[Any]:
    """The ids of one sample; a sequence longer than the model's limit keeps its last elements."""
    if isinstance(cell, list | tuple | np.ndarray):
        return list(cell)[-entry["max_length"] :]
    if text_of(cell) is None:
        return [] if entry.get("kind") == "sequence" else [None]
    return [cell]


def as_rows(flat: list[Any], entry: dict[str, Any]) -> np.ndarray:
    try:
        return np.asarray(flat, dtype=np.int64)
    except (TypeError, ValueError):
        raise ValueError(f"feature {entry['name']!r}: expected rows of its table, whole numbers") from None


def pad_ids(rows: np.ndarray, lengths: np.ndarray, entry: dict[str, Any]) -> torch.Tensor:
    """One row per sample, padded with -1."""
    import torch

    if rows.max(initial=-1) >= entry["num_rows"] or rows.min(initial=0) < -1:
        raise ValueError(f"feature {entry['name']!r}: ids must lie in [0, {entry['num_rows']})")
    padded = np.full((len(lengths), lengths.max(initial=1)), -1, dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = rows
    return torch.from_numpy(padded)


mlflow.models.set_model(RankingProgram())
