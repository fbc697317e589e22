"""Embedding tables for lookups on a CPU: rows as float32, bf16, or 8 or 4 bits with a scale and an offset per row.

    form      bytes of a row of width D      lookup
    float32   4 * D                          torch.embedding_bag
    bf16      2 * D                          rows are gathered, widened and pooled
    int8      D + 8                          FBGEMM's, as torch.ops.quantized has it (no fbgemm_gpu needed)
    int4      D / 2 + 4                      the same; an odd width is stored with a column of zeros

These lookups are the definition; a model looks up all tables of its own at once (kernels/pool_tables, lookups.py).
Tables that share parameters are looked up in their one array (kernels/shared_lookup).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels import shared_lookup
from kernels.shared_lookup import SharedFeatures, SharedLayout
from recmill.serving.batch import Ints
from recmill.serving.signature import StoredTable, TableForm

# N = ids, B = lists, D = embedding width
BYTE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}
_SUM = 0  # torch's number of the mode


class ServedTable(Protocol):
    """A table: one row per id, or one sum per list."""

    dim: int

    def rows(self, ids_N: Tensor) -> Tensor:
        """[N, D] float32."""
        ...

    def sums(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """[B, D] float32: the sums of lists; an empty list has zeros."""
        ...


def row_bytes(form: TableForm, dim: int) -> int:
    return {"float32": 4 * dim, "bf16": 2 * dim, "int8": dim + 8, "int4": (dim + 1) // 2 + 4}[form]


def pack_rows(rows_ND: Tensor, form: TableForm) -> Tensor:
    """float32 rows as the bytes of a form: uint8 [N, bytes per row]."""
    rows_ND = rows_ND.detach().float().contiguous()
    if form == "float32":
        return rows_ND.view(torch.uint8).view(len(rows_ND), -1)
    if form == "bf16":
        return rows_ND.bfloat16().view(torch.uint8).view(len(rows_ND), -1)
    if form == "int8":
        return torch.ops.quantized.embedding_bag_byte_prepack(rows_ND)  # type: ignore[no-any-return]
    even = torch.nn.functional.pad(rows_ND, (0, rows_ND.shape[1] % 2))
    return torch.ops.quantized.embedding_bag_4bit_prepack(even)  # type: ignore[no-any-return]


class StoredRows:
    """A table of its own, in any form. `bytes_` is [rows, bytes per row], in memory or mapped."""

    def __init__(self, table: StoredTable, bytes_: Tensor, order: Tensor | None = None) -> None:
        self.table, self.dim, self.order, self.bytes_ = table, table.dim, order, bytes_
        self.weight = bytes_.view(BYTE_DTYPES[table.form])
        quantised = {
            "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
            "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
        }
        self._quantised: Any = quantised.get(table.form)

    def _places(self, ids_N: Tensor) -> Tensor:
        return ids_N if self.order is None else self.order.index_select(0, ids_N).long()

    def rows(self, ids_N: Tensor) -> Tensor:
        if self._quantised is not None:
            return self.sums(ids_N, torch.arange(len(ids_N) + 1))
        found_ND = self.weight.index_select(0, self._places(ids_N))
        return found_ND if found_ND.dtype == torch.float32 else found_ND.float()

    def sums(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        if self._quantised is not None:
            if not len(ids_N):
                return torch.zeros(len(offsets) - 1, self.dim)
            places_N = self._places(ids_N)
            found: Tensor = self._quantised(self.weight, places_N, offsets, False, _SUM, False, None, None, True)
            return found if found.shape[1] == self.dim else found[:, : self.dim].contiguous()
        if self.table.form == "float32":
            return sum_rows_of(self.weight, self._places(ids_N), offsets)
        return sum_rows_of(self.rows(ids_N), torch.arange(len(ids_N)), offsets)


def sum_rows_of(weight: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """[B, D]: functional.embedding_bag without its checks, which take as long as a short list."""
    return torch.embedding_bag(weight, ids_N, offsets, False, _SUM, False, None, True)[0]


class SharedArrayRows:
    """A table whose rows are found by hashing in an array that several tables share."""

    def __init__(
        self, array: Tensor, exponents: Tensor | None, exact_ids: Tensor, *, layout: SharedLayout, numbers: Tensor
    ) -> None:
        self.array, self.exponents, self.layout = array, exponents, layout
        self.dim = int(numbers[1])
        self._features = SharedFeatures(numbers.view(1, 8), exact_ids, self.dim)

    def rows(self, ids_N: Tensor) -> Tensor:
        return self._look_up(ids_N, torch.tensor([0, len(ids_N)]), is_pooled=False)

    def sums(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        return self._look_up(ids_N, offsets, is_pooled=True)

    def _look_up(self, ids_N: Tensor, offsets: Tensor, *, is_pooled: bool) -> Tensor:
        how: dict[str, Any] = {"layout": self.layout, "features": self._features, "exponents": self.exponents}
        return shared_lookup(self.array, ids_N, offsets, is_pooled=is_pooled, **how)


def pool_lists(table: ServedTable, values: Ints, offsets: Ints, *, is_mean: bool) -> Tensor:
    """[B, D]: the sum or mean of each list's rows."""
    ids_N = torch.from_numpy(values)
    if len(values) == len(offsets) - 1 and _holds_single_ids(offsets):
        return table.rows(ids_N)
    sums_BD = table.sums(ids_N, torch.from_numpy(offsets))
    if is_mean:
        lengths = np.maximum(offsets[1:] - offsets[:-1], 1).astype(np.float32)
        sums_BD = sums_BD / torch.from_numpy(lengths)[:, None]
    return sums_BD


def _holds_single_ids(offsets: Ints) -> bool:
    """Whether every list has one id, as in most sparse features."""
    return bool((offsets[1:] - offsets[:-1] == 1).all())
