"""The exported program behind MLflow's model interface. Self-contained: a server needs torch, numpy and pandas only."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd

if TYPE_CHECKING:
    import torch


class RankingProgram(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Probabilities for the rows of a data frame: dense columns hold numbers, id columns an id or a list of ids.

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
        check_program(context.artifacts["program"], self.signature["sha256"])
        self.program = torch.export.load(context.artifacts["program"]).module()

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> np.ndarray | pd.DataFrame:
        import torch

        dense = model_input[self.signature["dense"]].to_numpy(dtype=np.float32, copy=True).reshape(len(model_input), -1)
        ids = [pad_ids(model_input[entry["name"]].tolist(), entry) for entry in self.signature["ids"]]
        with torch.no_grad():
            probabilities: np.ndarray = self.program(torch.from_numpy(dense), ids).numpy()
        if probabilities.ndim == 1:
            return probabilities
        return pd.DataFrame(probabilities, columns=self.signature["labels"], index=model_input.index)


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


def pad_ids(lists: list[Any], entry: dict[str, Any]) -> torch.Tensor:
    """One row per sample, padded with -1; sequences longer than the model's limit keep their last elements."""
    import torch

    rows = [np.atleast_1d(np.asarray(row, dtype=np.int64))[-entry["max_length"] :] for row in lists]
    padded = np.full((len(rows), max([len(row) for row in rows] + [1])), -1, dtype=np.int64)
    for position, row in enumerate(rows):
        padded[position, : len(row)] = row
    if padded.max(initial=-1) >= entry["num_rows"] or padded.min(initial=0) < -1:
        raise ValueError(f"feature {entry['name']!r}: ids must lie in [0, {entry['num_rows']})")
    return torch.from_numpy(padded)


mlflow.models.set_model(RankingProgram())
