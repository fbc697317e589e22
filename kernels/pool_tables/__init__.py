"""Lists of several features, looked up in tables of any form and pooled, all in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("float32", "bf16", "int8", "int4")
Lists = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # values, offsets


@dataclass(frozen=True, kw_only=True, eq=False)
class TableFeature:
    """A feature's table, and what becomes of its lists.

        form      bytes of a row of width D
        float32   4 * D
        bf16      2 * D
        int8      D numbers, then scale and offset as float32: value = offset + scale * number
        int4      D numbers, low halves of bytes first, then scale and offset as float16

    Row r is rows[order[r]], or rows[r] without an order.
    """

    rows: Tensor  # uint8 [rows, bytes per row]
    form: str
    dim: int
    order: Tensor | None = None  # int32 [rows]
    column: int = -1  # where its vector begins in the output; -1: its rows are not pooled
    is_mean: bool = False
    max_length: int = 0  # how many of the last ids of a list count; 0: all


class PooledTables:
    """The features of a lookup, which share an output of `width` columns. Built once, used for every batch."""

    def __init__(self, features: Sequence[TableFeature], *, width: int) -> None:
        self.features, self.width = tuple(features), width
        numbers: list[list[int]] = [
            [FORMS.index(own.form), own.dim, own.column, int(own.is_mean), own.max_length] for own in features
        ]
        self.unpooled_dims = [(position, own.dim) for position, own in enumerate(features) if own.column < 0]
        self.compiled = _cpu.PooledTables(
            [own.rows for own in features],
            [own.order for own in features],
            np.array(numbers, dtype=np.int64).reshape(-1, 5),
            width,
        )


# B = lists per feature, W = columns, N = ids of a feature, D = width of its rows
def pool_tables(
    tables: PooledTables, lists: Sequence[Lists], *, num_lists: int, kernel: str | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The vectors [B, W] of all features that are pooled, and the rows [N, D] of each of the others.

    `lists` are those of the features in their order. Columns that belong to no feature are left as they are in memory.
    ValueError if offsets or ids, whatever they contain, are not those of lists and rows. The bits of a vector depend
    neither on other lists nor on the number of threads.
    """
    import torch

    out_BW = torch.empty(num_lists, tables.width)
    rows: list[Any] = [torch.empty(len(lists[position][0]), dim) for position, dim in tables.unpooled_dims]
    if pick_backend(kernel, None) == "reference":
        from kernels.pool_tables import reference

        reference.pool_tables(tables, lists, out_BW, rows)
    else:
        _cpu.pool_tables(tables.compiled, [own[0] for own in lists], [own[1] for own in lists], num_lists, out_BW, rows)
    return out_BW, rows
