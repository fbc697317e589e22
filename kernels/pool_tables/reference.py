"""The definition of the lookup in torch: list after list, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.pool_tables import Lists, PooledTables, TableFeature


def unpack_rows(feature: TableFeature, places_N: Tensor) -> Tensor:
    """The numbers of some rows of a table: float64 [N, D]."""
    bytes_ = feature.rows[places_N]
    if feature.form in ("float32", "bf16"):
        return bytes_.view(torch.float32 if feature.form == "float32" else torch.bfloat16).double()
    width = feature.dim if feature.form == "int8" else (feature.dim + 1) // 2
    dtype = torch.float32 if feature.form == "int8" else torch.float16
    scale_N, offset_N = bytes_[:, width:].clone(memory_format=torch.contiguous_format).view(dtype).double().unbind(1)
    numbers = bytes_[:, :width]
    if feature.form == "int4":
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).flatten(1)[:, : feature.dim]
    return offset_N[:, None] + scale_N[:, None] * numbers.double()


def pool_tables(tables: PooledTables, lists: Sequence[Lists], out_BW: Tensor, rows: Sequence[Tensor]) -> None:
    unpooled = iter(rows)
    for feature, (values, offsets) in zip(tables.features, lists, strict=True):
        ids_N = torch.from_numpy(values)
        rows_ND = unpack_rows(feature, ids_N if feature.order is None else feature.order[ids_N].long())
        if feature.column < 0:
            next(unpooled).copy_(rows_ND)
            continue
        columns = slice(feature.column, feature.column + feature.dim)
        for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
            own_LD = rows_ND[max(begin, end - feature.max_length) if feature.max_length else begin : end]
            out_BW[row, columns] = own_LD.sum(0) / (max(1, len(own_LD)) if feature.is_mean else 1)
