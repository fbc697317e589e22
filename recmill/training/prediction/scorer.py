"""Probabilities of batches: by the model of a checkpoint, or by an exported program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.artifacts import Checkpoint, InputError, is_remote, read_checked_json
from recmill.data.ikjt.batch import Batch
from recmill.data.schema import Schema
from recmill.training.checkpoint import load_trained_model

SIGNATURE = "signature.json"
PROGRAM = "model.pt2"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checkpoint or an exported model, and what it was trained on."""

    path: str
    schema: Schema
    content_hash: str
    signature: dict[str, Any] | None = None  # of an exported model

    @classmethod
    def open(cls, path: str | Path) -> ModelFolder:
        if is_remote(path):
            raise InputError(f"{path}: expected a local or mounted folder with a model, not a URL")
        folder = Path(path)
        if (folder / Checkpoint.manifest_name).exists():
            loaded = Checkpoint.load(path)
            schema = Schema.from_json(loaded.schema, where=f"{path}/{Checkpoint.manifest_name}")
            return cls(path=str(path), schema=schema, content_hash=loaded.content_hash)
        if not (folder / SIGNATURE).exists():
            raise InputError(
                f"{path}: is no model: it holds neither {Checkpoint.manifest_name} (a checkpoint) nor {SIGNATURE} (an "
                "exported model)"
            )
        signature = read_checked_json(folder / SIGNATURE)
        if "schema" not in signature:
            raise InputError(f"{path}: was exported by an older recmill; export the checkpoint again")
        if "sha256" not in signature:
            raise InputError(f"{path}: was exported without its program; predict with the checkpoint")
        schema = Schema.from_json(signature["schema"], where=f"{path}/{SIGNATURE}")
        return cls(path=str(path), schema=schema, content_hash=signature["sha256"], signature=signature)

    @property
    def is_exported(self) -> bool:
        return self.signature is not None

    def load(self, *, deduplicated: frozenset[str] = frozenset()) -> Callable[[Batch], Tensor]:
        """A function from batches to probabilities, one column per label."""
        if self.signature is not None:
            return _load_program(Path(self.path), self.signature, self.schema)
        model, _ = load_trained_model(self.path, deduplicated=deduplicated)

        def score(batch: Batch) -> Tensor:
            scores: Tensor = torch.sigmoid(model(batch.dense_BF, batch.ids))
            return scores.view(len(batch), -1)

        return score


def _load_program(folder: Path, signature: Mapping[str, Any], schema: Schema) -> Callable[[Batch], Tensor]:
    from recmill.tracking.pyfunc import SIGNATURE_TYPES, check_program, check_types  # which loads MLflow

    try:
        check_types(signature, SIGNATURE_TYPES, str(folder / SIGNATURE))
        check_program(str(folder / PROGRAM), signature["sha256"])
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    entries, names = signature["ids"], [feature.name for feature in schema.id_features]
    if [entry["name"] for entry in entries] != names:
        raise InputError(f"{folder / SIGNATURE}: ids are not the features of its schema, {', '.join(names)}")
    program = torch.export.load(folder / PROGRAM).module()

    def score(batch: Batch) -> Tensor:
        ids = batch.ids.to_dict()
        padded = [pad_lists(ids[entry["name"]], int(entry["max_length"])) for entry in entries]
        scores: Tensor = program(batch.dense_BF, padded)
        return scores.view(len(batch), -1)

    return score


def pad_lists(lists: KeyedJaggedTensor, max_length: int) -> Tensor:
    """One row per sample, padded with -1; a list longer than `max_length` keeps its last elements."""
    lengths_B, ends_B = lists.lengths().long(), lists.offsets().long()[1:]
    kept_B = lengths_B.clamp(max=max_length)
    longest = max(1, int(kept_B.max()) if len(kept_B) else 1)
    places_L = torch.arange(longest)
    is_id_BL = places_L < kept_B[:, None]
    sources_BL = (ends_B - kept_B)[:, None] + places_L
    values = lists.values()
    if not len(values):
        return torch.full((len(lengths_B), longest), -1, dtype=torch.int64)
    return torch.where(is_id_BL, values[sources_BL.clamp(max=len(values) - 1)].long(), -1)
