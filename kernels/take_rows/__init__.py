"""Copies of chosen lists: index_select for jagged data."""

from __future__ import annotations

from collections.abc import Sequence

from kernels import _cpu
from kernels.backends import call_in_torch, count_jagged_rows, pick_backend
from kernels.buffers import OfOneKind, empty_like_kind


# F = features, U = rows taken, N = values taken, W = windows
def take_rows(
    values: Sequence[OfOneKind],
    offsets: Sequence[OfOneKind],
    rows_U: OfOneKind,
    *,
    kernel: str | None = None,
    num_threads: int = 0,
) -> tuple[OfOneKind, OfOneKind]:
    """The lists `rows_U` of every feature, feature by feature, as `(values_N, lengths_FU)`.

    This is the layout of a KeyedJaggedTensor with stride U. All values must have one dtype; lengths are int64. All
    arguments are numpy arrays or all are tensors.
    """
    num_rows = count_jagged_rows(values, offsets)
    if any(own.dtype != values[0].dtype or own.shape[1:] != values[0].shape[1:] for own in values):
        raise ValueError(f"values: expected one dtype and width, received {[str(own.dtype) for own in values]}")
    if pick_backend(kernel, values[0]) == "reference":
        from kernels.take_rows import reference

        return call_in_torch(reference.take_rows, values, offsets, rows_U)  # type: ignore[no-any-return]
    lengths_FU = empty_like_kind(rows_U, len(values) * len(rows_U), is_index=True)
    total = _cpu.take_lengths(values, offsets, num_rows, rows_U, lengths_FU)
    values_N = empty_like_kind(values[0], total, is_index=False)
    _cpu.take_values(values, offsets, num_rows, rows_U, lengths_FU, values_N, num_threads)
    return values_N, lengths_FU


def take_windows(
    values: OfOneKind,
    starts_W: OfOneKind,
    lengths_W: OfOneKind,
    *,
    num_values: int | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> OfOneKind:
    """values[start : start + length] of every window in sequence; `num_values`, if known, is their total length."""
    if starts_W.shape != lengths_W.shape or starts_W.ndim != 1:
        raise ValueError(f"received starts of shape {tuple(starts_W.shape)}, lengths of shape {tuple(lengths_W.shape)}")
    if pick_backend(kernel, values) == "reference":
        from kernels.take_rows import reference

        return call_in_torch(reference.take_windows, values, starts_W, lengths_W)  # type: ignore[no-any-return]
    total = int(lengths_W.sum()) if num_values is None else num_values
    out = empty_like_kind(values, max(total, 0), is_index=False)
    _cpu.take_windows(values, starts_W, lengths_W, out, num_threads)
    return out
