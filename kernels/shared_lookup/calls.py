"""The compiled kernels of shared lookups, called with tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import _cpu

LINE = 16  # slots that share a touched flag, a momentum in row-wise Adagrad and, if packed, an exponent


def count_lines(num_slots: int) -> int:
    return -(-num_slots // LINE)


class Lists:
    """The lists of ids of a lookup and the features they belong to, checked once for forward and backward."""

    def __init__(
        self,
        ids_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
        features: Tensor,
        exact_ids: Tensor,
        layout: list[int],
        width: int,
        is_pooled: bool,
        *,
        dtype: torch.dtype,
    ) -> None:
        if ids_N.dim() != 1:
            raise ValueError(f"ids: shape is {tuple(ids_N.shape)}, expected one dimension")
        weights = None if weights_N is None else weights_N.detach().to(dtype).contiguous()
        lists = (ids_N.long().contiguous(), offsets.long().contiguous(), weights)
        tables = (features.contiguous(), exact_ids.contiguous(), layout)
        self.compiled = _cpu.SharedLists(*lists, *tables, width, is_pooled)
        self.num_ids, self.shape = len(ids_N), (self.compiled.num_rows, width)


def look_up(
    array: Tensor,
    lists: Lists,
    *,
    has_max: bool,
    exponents: Tensor | None = None,
    kernel: str = "cpu",
    num_threads: int = 0,
) -> tuple[Tensor, Tensor]:
    """(vectors, winners): for max, which id of its list gave each element."""
    out = torch.empty(lists.shape, dtype=array.dtype if exponents is None else torch.float32)
    winners = torch.empty(lists.shape if has_max else (0,), dtype=torch.int32)
    how = (num_threads, kernel != "cpu_portable")
    _cpu.shared_lookup(lists.compiled, array.contiguous(), exponents, out, winners, *how)
    return out, winners


def scatter(
    target: Tensor,
    gradient: Tensor,
    lists: Lists,
    *,
    winners: Tensor | None = None,
    touched: Tensor | None = None,
    scale: float = 1.0,
    kernel: str = "cpu",
    num_threads: int = 0,
) -> None:
    """target += scale * gradient of the array."""
    gradient, how = gradient.to(target.dtype).contiguous(), (num_threads, kernel != "cpu_portable")
    _cpu.shared_scatter(lists.compiled, target, gradient, winners, touched, scale, *how)


def weigh(
    array: Tensor,
    gradient: Tensor,
    lists: Lists,
    *,
    exponents: Tensor | None = None,
    kernel: str = "cpu",
    num_threads: int = 0,
) -> Tensor:
    """The gradient of the ids' weights; zero for ids outside all lists."""
    dtype = array.dtype if exponents is None else torch.float32
    out_N, how = torch.zeros(lists.num_ids, dtype=dtype), (num_threads, kernel != "cpu_portable")
    _cpu.shared_weigh(lists.compiled, array.contiguous(), exponents, gradient.to(dtype).contiguous(), out_N, *how)
    return out_N
