"""How lists become the groups of an InverseKeyedJaggedTensor: which features share an inverse, and when it pays.

Shape suffixes: F = features of a group, B = samples, U = distinct rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels import dedup_rows, take_rows, take_windows, window_rows
from recmill.artifacts import InputError
from recmill.data.repeats import join_alike


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureLists:
    """One feature before deduplication: sample b holds values[offsets[b] : offsets[b + 1]]."""

    key: str
    values: Tensor
    offsets: Tensor  # int64, B + 1
    weights: Tensor | None = None

    @property
    def columns(self) -> list[Tensor]:
        return [self.values] if self.weights is None else [self.values, self.weights]

    @property
    def num_values(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTensors:
    """Features that share one inverse, each distinct row stored once.

    Row u of the f-th feature has `lengths_FU[f * U + u]` values. They follow one another in `values`, feature by
    feature; with `starts_FU`, they are the windows of `values` that begin there.
    `inverse_B` maps a sample to its row; None means that every sample has its own (U = B).
    """

    keys: tuple[str, ...]
    values: Tensor
    lengths_FU: Tensor
    num_stored: tuple[int, ...]  # how many of `values` belong to each feature
    weights: Tensor | None = None
    inverse_B: Tensor | None = None  # int32, because every sample has an entry
    starts_FU: Tensor | None = None  # int64

    @property
    def num_rows(self) -> int:
        return self.lengths_FU.numel() // len(self.keys)

    @property
    def tensors(self) -> dict[str, Tensor]:
        names = ("values", "lengths_FU", "weights", "inverse_B", "starts_FU")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> GroupTensors:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors.items()}
        return replace(self, **changed)

    def list_starts_FU(self) -> Tensor:
        """Where each stored list begins in `values`."""
        if self.starts_FU is not None:
            return self.starts_FU
        ends_FU = torch.cumsum(self.lengths_FU, 0, dtype=torch.int64)
        return ends_FU - self.lengths_FU


def lists_of_kjt(kjt: KeyedJaggedTensor) -> list[FeatureLists]:
    """The features of a KeyedJaggedTensor, as views."""
    if kjt.variable_stride_per_key():
        raise ValueError(f"the keys have {kjt.stride_per_key()} rows, expected a KeyedJaggedTensor with one batch size")
    offsets, stride = kjt.offsets().long(), kjt.stride()
    values, weights = kjt.values().contiguous(), kjt.weights_or_none()
    return [
        FeatureLists(
            key=key,
            values=values,
            weights=None if weights is None else weights.contiguous(),
            offsets=offsets[position * stride : (position + 1) * stride + 1],
        )
        for position, key in enumerate(kjt.keys())
    ]


def lists_of_arrow(batch: pa.RecordBatch | pa.Table, key: str) -> FeatureLists:
    """A list column (or a column of single ids) as views of its Arrow buffers; a missing list is empty."""
    position = batch.schema.get_field_index(key)
    if position < 0:
        raise InputError(f"column {key!r} is missing; the batch has {', '.join(batch.schema.names)}")
    column = batch.column(position)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    values, offsets = split_list_column(column, where=f"column {key!r}")
    first, last = int(offsets[0]), int(offsets[-1])
    values = values.slice(first, last - first)
    if values.null_count:
        at = first + int(pc.index(pc.is_null(values), True).as_py())
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise InputError(f"column {key!r}, row {row}: holds a missing id, expected numbers")
    whole = torch.from_numpy(offsets.astype(np.int64) - first)
    return FeatureLists(key=key, values=from_dlpack(values), offsets=whole)


def split_list_column(column: pa.Array, *, where: str) -> tuple[pa.Array, npt.NDArray[np.integer]]:
    """(int64 values, offsets into them) of a list column; a plain integer column reads as lists of one.

    A missing list is empty; the caller must check for missing ids. int64 lists are not copied: offsets of a sliced
    column are those of its parent, so they need not begin at 0.
    """
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if pa.types.is_integer(kind):
        values, offsets = column, np.arange(len(column) + 1, dtype=np.int32)
    elif not is_list or not pa.types.is_integer(kind.value_type):
        raise InputError(f"{where} is {kind}, expected list<int64>")
    elif column.null_count or pa.types.is_fixed_size_list(kind):
        # A null list may cover values in the child array; flatten() drops those.
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        values, offsets = column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    else:
        # .values ignores the slice and .offsets respects it, so absolute offsets index the whole child.
        values, offsets = column.values, column.offsets.to_numpy()
    return values if pa.types.is_int64(values.type) else pc.cast(values, pa.int64()), offsets


def check_groups(groups: Sequence[Sequence[str]], windows: Sequence[str], *, known: Collection[str]) -> None:
    """Raise unless the groups are not empty and name each known feature at most once."""
    grouped = [key for group in groups for key in group]
    for key in [*grouped, *windows]:
        if key not in known:
            raise InputError(f"unknown feature {key!r}; the id features are {', '.join(known)}")
    if len(set(grouped)) != len(grouped) or not all(groups):
        raise InputError(f"groups: expected each feature once and no empty group, received {groups}")


def choose_groups(features: Sequence[FeatureLists]) -> list[list[str]]:
    """Groups of features that change together, found from the lists themselves.

    This costs one dedup per feature and a cheap one per pair of similar features: choose once, then reuse the groups.
    """
    found = []
    for feature in features:
        unique_U, inverse_B = dedup_rows(feature.columns, [feature.offsets] * len(feature.columns))
        found.append((feature.key, unique_U.cpu().numpy(), inverse_B.cpu().numpy()))
    return [keys for keys, _, _ in join_alike(found)]


def build_group(
    features: Sequence[FeatureLists],
    *,
    min_factor: float,
    use_windows: bool,
    lengths_dtype: torch.dtype,
) -> GroupTensors:
    """The features as one group: deduplicated, and as windows, each only if it saves `min_factor`."""
    columns = [column for feature in features for column in feature.columns]
    offsets = [feature.offsets for feature in features for _ in feature.columns]
    unique_U, inverse_B = dedup_rows(columns, offsets)
    num_before = sum(feature.num_values for feature in features)
    num_after = sum(int(feature.offsets.diff().index_select(0, unique_U).sum()) for feature in features)
    if _factor(num_before, num_after, len(inverse_B), len(unique_U)) < min_factor:
        group = _plain_group(features, lengths_dtype)
    else:
        group = _distinct_group(features, unique_U, inverse_B, lengths_dtype)
    return _as_windows(group, min_factor) if use_windows else group


def _factor(num_before: int, num_after: int, num_samples: int, num_rows: int) -> float:
    if num_after:
        return num_before / num_after
    return num_samples / num_rows if num_rows else 1.0


def _plain_group(features: Sequence[FeatureLists], lengths_dtype: torch.dtype) -> GroupTensors:
    """One row per sample; a feature that is alone is not copied."""
    columns = [[column[f.offsets[0] : f.offsets[-1]] for column in f.columns] for f in features]
    values, *weights = (torch.cat(own) if len(own) > 1 else own[0] for own in zip(*columns, strict=True))
    return GroupTensors(
        keys=tuple(feature.key for feature in features),
        values=values,
        weights=weights[0] if weights else None,
        lengths_FU=torch.cat([feature.offsets.diff() for feature in features]).to(lengths_dtype),
        num_stored=tuple(feature.num_values for feature in features),
    )


def _distinct_group(
    features: Sequence[FeatureLists], unique_U: Tensor, inverse_B: Tensor, lengths_dtype: torch.dtype
) -> GroupTensors:
    offsets = [feature.offsets for feature in features]
    taken = [take_rows(list(own), offsets, unique_U) for own in zip(*(f.columns for f in features), strict=True)]
    values, lengths_FU = taken[0]
    return GroupTensors(
        keys=tuple(feature.key for feature in features),
        values=values,
        weights=taken[1][0] if len(taken) > 1 else None,
        lengths_FU=lengths_FU.to(lengths_dtype),
        num_stored=tuple(lengths_FU.view(len(features), len(unique_U)).sum(1).tolist()),
        inverse_B=inverse_B.int(),
    )


def _as_windows(group: GroupTensors, min_factor: float) -> GroupTensors:
    """The same group with its lists as windows into one buffer per feature, if that saves `min_factor`."""
    values, weights, starts = [], [], []
    sizes: list[int] = []
    begin = 0
    starts_FU = group.list_starts_FU().view(len(group.keys), group.num_rows)
    for starts_U, num_stored in zip(starts_FU, group.num_stored, strict=True):
        offsets = torch.cat([starts_U, starts_U.new_tensor([begin + num_stored])])
        begin += num_stored
        buffer, buffer_weights, window_starts_U = window_rows(group.values, offsets, weights=group.weights)
        starts.append(window_starts_U + sum(sizes))
        sizes.append(len(buffer))
        values.append(buffer)
        if buffer_weights is not None:
            weights.append(buffer_weights)
    if begin < min_factor * max(sum(sizes), 1):
        return group
    return replace(
        group,
        values=torch.cat(values),
        weights=torch.cat(weights) if weights else None,
        num_stored=tuple(sizes),
        starts_FU=torch.cat(starts),
    )


def select_rows(lengths: Tensor, inverse_B: Tensor | None) -> Tensor:
    return lengths if inverse_B is None else lengths.index_select(-1, inverse_B)


def _cut_lists(
    values: Tensor, lengths: Tensor, num_keys: int, weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The values, lengths and weights of each key of a key-major jagged tensor."""
    by_key = lengths.view(num_keys, lengths.numel() // num_keys)
    sizes = by_key.sum(1).tolist()
    cut = [None] * num_keys if weights is None else torch.split(weights, sizes)
    return list(zip(torch.split(values, sizes), by_key, cut, strict=True))


def expand_group(group: GroupTensors) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The lists of every sample, for each feature of the group."""
    num_keys = len(group.keys)
    if group.inverse_B is None and group.starts_FU is None:
        return _cut_lists(group.values, group.lengths_FU, num_keys, group.weights)
    shape = (num_keys, group.num_rows)
    lengths_FB = select_rows(group.lengths_FU.view(shape), group.inverse_B).reshape(-1)
    starts_FB = select_rows(group.list_starts_FU().view(shape), group.inverse_B).reshape(-1)
    values = take_windows(group.values, starts_FB, lengths_FB.long())
    weights = None if group.weights is None else take_windows(group.weights, starts_FB, lengths_FB.long())
    return _cut_lists(values, lengths_FB, num_keys, weights)
