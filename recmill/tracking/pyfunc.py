"""The exported program behind MLflow's model interface. Self-contained: a server needs torch, numpy and pandas only."""

from __future__ import annotations

import json
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

        self.program = torch.export.load(context.artifacts["program"]).module()
        with open(context.artifacts["signature"], encoding="utf-8") as file:
            self.signature = json.load(file)

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
