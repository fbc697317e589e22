"""The definition of `count_rows` in torch; also used on CUDA, where bincount is a kernel already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.buffers import Array


def count_rows(counts_R: Array, ids: Array) -> None:
    counts, rows = torch.as_tensor(counts_R), torch.as_tensor(ids).reshape(-1)
    bad = (rows < 0) | (rows >= len(counts))
    if bad.any():
        position = int(bad.nonzero()[0])
        raise ValueError(f"ids[{position}] is {int(rows[position])}, expected a row in [0, {len(counts)})")
    counts += torch.bincount(rows, minlength=len(counts))
