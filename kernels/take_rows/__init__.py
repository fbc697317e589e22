"""Copies of chosen lists: index_select for jagged data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import count_jagged_rows, pick_backend

if TYPE_CHECKING:
    from torch import Tensor


# F = features, U = rows taken, N = values taken, W = windows
def take_rows(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    rows_U: Tensor,
    *,
    kernel: str | None = None,
    num_threads: int = 0,
) -> tuple[Tensor, Tensor]:
    """The lists `rows_U` of every feature, feature by feature, as `(values_N, lengths_FU)`.

    This is the layout of a KeyedJaggedTensor with stride U. All values must have one dtype; lengths are int64.
    """
    import torch

    num_rows = count_jagged_rows(values, offsets)
    if any(own.dtype != values[0].dtype or own.shape[1:] != values[0].shape[1:] for own in values):
        raise ValueError(f"values: expected one dtype and width, received {[str(own.dtype) for own in values]}")
    if pick_backend(kernel, values[0]) == "reference":
        from kernels.take_rows import reference

        return reference.take_rows(values, offsets, rows_U)
    lengths_FU = torch.empty(len(values) * len(rows_U), dtype=torch.int64)
    total = _cpu.take_lengths(values, offsets, num_rows, rows_U, lengths_FU)
    values_N = values[0].new_empty(total, *values[0].shape[1:])
    _cpu.take_values(values, offsets, num_rows, rows_U, lengths_FU, values_N, num_threads)
    return values_N, lengths_FU


def take_windows(
    values: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    *,
    num_values: int | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> Tensor:
    """values[start : start + length] of every window in sequence; `num_values`, if known, is their total length."""
    if starts_W.shape != lengths_W.shape or starts_W.dim() != 1:
        raise ValueError(f"received starts of shape {tuple(starts_W.shape)}, lengths of shape {tuple(lengths_W.shape)}")
    if pick_backend(kernel, values) == "reference":
        from kernels.take_rows import reference

        return reference.take_windows(values, starts_W, lengths_W)
    total = int(lengths_W.sum()) if num_values is None else num_values
    out = values.new_empty(max(total, 0), *values.shape[1:])
    _cpu.take_windows(values, starts_W, lengths_W, out, num_threads)
    return out
