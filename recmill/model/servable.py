"""The model for serving: plain tensors in, probabilities out, without TorchRec.

Ids are one padded matrix per feature (padding is -1), so that torch.export can capture the whole model:

    feature:   history = [[7, 9], [4]]     ->     [[7, 9], [4, -1]]
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.shared_lookup.layout import LINE
from kernels.shared_lookup.reference import find_slots
from recmill.data.schema import Feature, Schema
from recmill.model.ranker import Ranker
from recmill.model.ranking_model import RankingModel
from recmill.model.stores.shared.array import SharedArray

# B = batch, F = dense features, L = padded length, D = embedding width
EXAMPLE_BATCH = 3
EXAMPLE_LENGTH = 2  # not 1: torch.export would treat a length of one as a constant


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write an exported program; a full disk is an OSError, as everywhere."""
    with open(path, "wb") as file:
        kept = _ErrorKeeper(file)
        target: Any = kept
        torch.export.save(program, target)
        if kept.error is not None:
            raise kept.error


class _ErrorKeeper(io.RawIOBase):
    """Passes bytes on until a write fails, and keeps that error: torch's writer ends the process when a write fails."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return 0  # torch rewinds what it has written, for buffers in memory

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


class SharedRows(nn.Module):
    """Rows of tables that share parameters, found by hashing in plain torch: the server needs no custom operator."""

    exact_ids: Tensor
    exponents: Tensor | None

    def __init__(self, array: SharedArray) -> None:
        super().__init__()
        self.array = nn.Parameter(array.weight.detach(), requires_grad=False)
        self.register_buffer("exponents", array.exponents)
        self.register_buffer("exact_ids", array.exact_ids)
        self.layout = array.layout.numbers()
        self.numbers = {name: array.features([name]).rows[0].tolist() for name in array.tables}

    def forward(self, ids_BL: Tensor, table: str) -> Tensor:
        slots_ND = find_slots(ids_BL.flatten(), self.numbers[table], self.exact_ids, self.layout)
        if self.exponents is None:
            rows_ND = nn.functional.embedding(slots_ND, self.array[:, None]).squeeze(-1)
        else:  # int8 weights stay int8 at the server
            rows_ND = self.array[slots_ND] * torch.exp2(self.exponents[slots_ND // LINE].float())
        return rows_ND.view(*ids_BL.shape, rows_ND.shape[-1])


class ServableModel(nn.Module):
    """Probabilities [B] from dense values [B, F] and one padded id matrix [B, L] per feature, in schema order.

    With several labels [B, T], in the order of the schema.
    """

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        self.schema: Schema = model.embeddings.schema
        self.ranker: Ranker = model.ranker
        self.max_sequence_length = model.embeddings.max_sequence_length
        weights = model.embeddings.table_weights()
        names = [table.name for table in self.schema.tables if table.name in weights]
        order = {name: position for position, name in enumerate(names)}
        self.table_of = {f.name: order[f.table] for f in self.schema.id_features if f.table in order}
        self.tables = nn.ParameterList(nn.Parameter(weights[name], requires_grad=False) for name in order)
        arrays = model.embeddings.shared_arrays
        self.shared = SharedRows(arrays[0]) if arrays else None

    def forward(self, dense_BF: Tensor, ids: list[Tensor]) -> Tensor:
        pooled: dict[str, Tensor] = {}
        sequences: dict[str, tuple[Tensor, Tensor]] = {}
        for feature, ids_BL in zip(self.schema.id_features, ids, strict=True):
            is_id_BL = ids_BL >= 0
            rows_BLD = self._rows(feature, ids_BL.clamp(min=0))
            rows_BLD = rows_BLD * is_id_BL[:, :, None].to(rows_BLD.dtype)
            lengths_B = is_id_BL.sum(1)
            if feature.kind == "sequence":
                sequences[feature.name] = (rows_BLD, lengths_B)
            elif feature.pooling == "mean":
                pooled[feature.name] = rows_BLD.sum(1) / lengths_B.clamp(min=1)[:, None].to(rows_BLD.dtype)
            else:
                pooled[feature.name] = rows_BLD.sum(1)
        return torch.sigmoid(self.ranker(dense_BF, pooled, sequences))

    def _rows(self, feature: Feature, ids_BL: Tensor) -> Tensor:
        if feature.name in self.table_of:
            return nn.functional.embedding(ids_BL, self.tables[self.table_of[feature.name]])
        assert self.shared is not None
        return self.shared(ids_BL, feature.table)

    def example_inputs(self) -> tuple[Tensor, list[Tensor]]:
        dense = torch.zeros(EXAMPLE_BATCH, len(self.schema.dense))
        return dense, [torch.zeros(EXAMPLE_BATCH, EXAMPLE_LENGTH, dtype=torch.int64) for _ in self.schema.id_features]

    def export(self) -> torch.export.ExportedProgram:
        """The whole model as one program, for any batch size and any list length."""
        batch = torch.export.Dim("batch", min=1)

        def shape(feature: Feature, position: int) -> dict[int, torch.export.Dim]:
            limit = self.max_sequence_length if feature.kind == "sequence" else 1 << 20
            return {0: batch, 1: torch.export.Dim(f"length_{position}", min=1, max=limit)}

        ids = [shape(feature, position) for position, feature in enumerate(self.schema.id_features)]
        return torch.export.export(self.eval(), self.example_inputs(), dynamic_shapes=({0: batch}, ids))
