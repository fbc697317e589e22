"""A batch that stores each distinct feature list once (RecD's IKJT).

Shape suffixes: F = features of a group, B = samples, U = distinct rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from kernels import expand_jagged, expand_rows, take_windows
from recmill.data.ikjt.build import (
    MIN_FACTOR,
    FeatureLists,
    GroupTensors,
    build_group,
    choose_groups,
    lists_of_arrow,
    lists_of_kjt,
)
from recmill.data.schema import Schema


class InverseKeyedJaggedTensor(Pipelineable):  # type: ignore[misc]
    """A batch that stores each distinct feature list once.

        sample:       0        1        2
        lists:      [7, 9]   [7, 9]    [4]
        values   = [7, 9, 4]     offsets = [0, 2, 3]
        inverse  = [0, 0, 1]     # sample -> stored list

    Features of one group share the inverse: a row is the lists of all of them, and repeats only where all repeat.

        sample:       0        1        2
        a:          [7, 9]   [7, 9]    [7, 9]
        b:          [1]      [1]       [2]
        group (a, b):  rows ([7, 9], [1]), ([7, 9], [2])     inverse = [0, 0, 1]

    Histories that move on are windows into one buffer, whether their rows repeat or not:

        rows:      [a, b, c, d]   [b, c, d, e]
        values   = [a, b, c, d, e]     (start, length) = (0, 4), (1, 4)

    A group that repeats too little to pay is plain: one row a sample, no inverse, nothing copied where its features lie
    side by side already, and `expand` gives back what it received. Weights, where there are any, are part of a row.
    """

    def __init__(self, keys: Sequence[str], groups: Sequence[GroupTensors], *, stride: int) -> None:
        """From groups as they were stored or sent; `keys` is the order of the features in `to_kjt()`."""
        grouped = [key for group in groups for key in group.keys]
        if sorted(grouped) != sorted(keys):
            raise ValueError(f"the groups hold {grouped}, expected each of {list(keys)} once")
        for group in groups:
            num_samples = group.num_rows if group.inverse_B is None else len(group.inverse_B)
            if num_samples != stride:
                raise ValueError(f"group {', '.join(group.keys)}: holds {num_samples} samples, expected {stride}")
        self._keys = list(keys)
        self._groups = tuple(groups)
        self._stride = stride
        self._kjts: dict[int, KeyedJaggedTensor] = {}

    @classmethod
    def from_lists(
        cls,
        features: Sequence[FeatureLists],
        *,
        groups: Sequence[Sequence[str]] | None = None,
        windows: Sequence[str] = (),
        min_factor: float = MIN_FACTOR,
        lengths_dtype: torch.dtype = torch.int32,
        num_threads: int = 0,
    ) -> Self:
        """Deduplicate features given as values and offsets; the arguments are those of `from_kjt`."""
        by_key = {feature.key: feature for feature in features}
        if len(by_key) != len(features) or not features:
            raise ValueError(f"expected features of different names, received {[feature.key for feature in features]}")
        if groups is None:
            groups = choose_groups(features, num_threads=num_threads)
        _check_keys(groups, windows, by_key)
        alone = set(by_key) - {key for group in groups for key in group}
        stored = [
            build_group(
                [by_key[key] for key in group],
                min_factor=min_factor,
                use_windows=any(key in windows for key in group),
                lengths_dtype=lengths_dtype,
                num_threads=num_threads,
            )
            for group in [*groups, *([key] for key in by_key if key in alone)]
        ]
        return cls(list(by_key), stored, stride=len(features[0].offsets) - 1)

    @classmethod
    def from_kjt(
        cls,
        kjt: KeyedJaggedTensor,
        groups: Sequence[Sequence[str]] | None = None,
        *,
        windows: Sequence[str] = (),
        min_factor: float = MIN_FACTOR,
        num_threads: int = 0,
    ) -> Self:
        """Deduplicate a KeyedJaggedTensor.

        `groups` says which features share an inverse, [["a", "b"], ["c"]]; a feature in none gets its own, and None
        finds them by comparing all features (choose once, then pass `.groups` on). `windows` names the features whose
        lists shift. A group stays plain if it holds less than `min_factor` times the values it would store.
        """
        return cls.from_lists(
            lists_of_kjt(kjt),
            groups=groups,
            windows=windows,
            min_factor=min_factor,
            lengths_dtype=kjt.lengths().dtype,
            num_threads=num_threads,
        )

    @classmethod
    def from_arrow(
        cls,
        batch: pa.RecordBatch | pa.Table,
        schema: Schema,
        *,
        groups: Sequence[Sequence[str]] | None = None,
        min_factor: float = MIN_FACTOR,
        num_threads: int = 0,
    ) -> Self:
        """Deduplicate the id features of `schema` straight from Arrow's buffers.

        Groups are those the schema names (`Feature.group`) unless given; features that `shift` become windows.
        """
        if groups is None:
            by_group: dict[str, list[str]] = {}
            for feature in schema.id_features:
                by_group.setdefault(feature.group or f"/{feature.name}", []).append(feature.name)
            groups = list(by_group.values())
        return cls.from_lists(
            [lists_of_arrow(batch, feature.name) for feature in schema.id_features],
            groups=groups,
            windows=[feature.name for feature in schema.id_features if feature.shift],
            min_factor=min_factor,
            num_threads=num_threads,
        )

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """B, the samples of the batch."""
        return self._stride

    @property
    def groups(self) -> list[list[str]]:
        return [list(group.keys) for group in self._groups]

    def group_of(self, key: str) -> int:
        """The position of the group that holds `key`."""
        for position, group in enumerate(self._groups):
            if key in group.keys:
                return position
        raise ValueError(f"unknown feature {key!r}; the batch has {', '.join(self._keys)}")

    def is_plain(self, g: int) -> bool:
        """Whether group `g` holds one row a sample because it repeats too little."""
        return self._groups[g].inverse_B is None

    def num_distinct(self, g: int) -> int:
        """U of group `g`."""
        return self._groups[g].num_rows

    def group_kjt(self, g: int) -> KeyedJaggedTensor:
        """The distinct rows of group `g` as a plain KeyedJaggedTensor with stride U."""
        if g not in self._kjts:
            group = self._groups[g]
            values, weights = group.values, group.weights
            per_key: list[int] | None = list(group.num_stored)
            if group.starts_FU is not None:
                per_key = None
                lengths = group.lengths_FU.long()
                values = take_windows(values, group.starts_FU, lengths)
                weights = None if weights is None else take_windows(weights, group.starts_FU, lengths)
            self._kjts[g] = KeyedJaggedTensor(
                keys=list(group.keys),
                values=values,
                weights=weights,
                lengths=group.lengths_FU,
                stride=group.num_rows,
                length_per_key=per_key,
            )
        return self._kjts[g]

    def inverse(self, g: int) -> Tensor:
        """Sample -> row of group_kjt(g), int64; for a plain group 0, 1, 2, ..."""
        inverse_B = self._groups[g].inverse_B
        if inverse_B is None:
            return torch.arange(self._stride, device=self.device())
        return inverse_B.long()

    def windows(self, key: str) -> tuple[Tensor, Tensor, Tensor] | None:
        """`(buffer, starts_U, lengths_U)` if the lists of `key` are windows: look the buffer up once, then cut."""
        group = self._groups[self.group_of(key)]
        if group.starts_FU is None:
            return None
        position = group.keys.index(key)
        rows = slice(position * group.num_rows, (position + 1) * group.num_rows)
        first = sum(group.num_stored[:position])
        buffer = group.values[first : first + group.num_stored[position]]
        return buffer, group.starts_FU[rows] - first, group.lengths_FU[rows].long()

    def expand(self, g: int, x: Any) -> Any:
        """A Tensor, JaggedTensor or KeyedTensor over the distinct rows of group `g`, as one over the samples."""
        inverse_B, num_distinct = self._groups[g].inverse_B, self.num_distinct(g)
        values = x.values() if isinstance(x, KeyedTensor) else x
        num_rows = len(x.lengths()) if isinstance(x, JaggedTensor) else values.shape[0]
        if num_rows != num_distinct:
            raise ValueError(f"group {g}: received {num_rows} rows, expected its {num_distinct} distinct rows")
        if inverse_B is None:
            return x
        if isinstance(x, JaggedTensor):
            expanded, offsets = expand_jagged(x.values(), x.offsets().long(), inverse_B)
            weights = x.weights_or_none()
            if weights is not None:
                weights, _ = expand_jagged(weights, x.offsets().long(), inverse_B, num_values=len(expanded))
            return JaggedTensor(values=expanded, offsets=offsets, weights=weights)
        if isinstance(x, KeyedTensor):
            return KeyedTensor(x.keys(), x.length_per_key(), expand_rows(values, inverse_B))
        return expand_rows(values, inverse_B)

    def to_kjt(self) -> KeyedJaggedTensor:
        """The batch as it was before: every list of every sample."""
        lists: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        for group in self._groups:
            lists.update(zip(group.keys, _expand_group(group), strict=True))
        parts = [lists[key] for key in self._keys]
        weights = [part[2] for part in parts if part[2] is not None]
        return KeyedJaggedTensor(
            keys=list(self._keys),
            values=torch.cat([part[0] for part in parts]),
            lengths=torch.cat([part[1] for part in parts]),
            weights=torch.cat(weights) if weights else None,
            stride=self._stride,
        )

    def dedup_factor(self, key: str | None = None) -> float:
        """How many values the batch has for each value it stores, for one feature or for all."""
        before = after = 0
        for group in self._groups:
            lengths_FU = group.lengths_FU.view(len(group.keys), group.num_rows)
            for position, name in enumerate(group.keys):
                if key is None or name == key:
                    lengths_U = lengths_FU[position]
                    before += int(_select(lengths_U, group.inverse_B).sum())
                    after += group.num_stored[position]
        if key is not None and not after:
            return self._stride / max(1, self.num_distinct(self.group_of(key))) if self._stride else 1.0
        return before / after if after else 1.0

    def map_values(self, key: str, fn: Callable[[Tensor], Tensor]) -> Self:
        """The batch with `fn` applied to the stored values of `key`: one result a value, each depending on it alone."""
        g = self.group_of(key)
        group = self._groups[g]
        pieces = list(torch.split(group.values, list(group.num_stored)))
        position = group.keys.index(key)
        mapped = fn(pieces[position])
        if mapped.shape != pieces[position].shape:
            raise ValueError(
                f"map_values({key!r}): received {tuple(mapped.shape)} for {tuple(pieces[position].shape)} values"
            )
        if len(pieces) > 1 and mapped.dtype != group.values.dtype:
            raise ValueError(
                f"map_values({key!r}): gave {mapped.dtype}, the others of its group are {group.values.dtype}"
            )
        pieces[position] = mapped
        values = torch.cat(pieces) if len(pieces) > 1 else mapped
        return self._with_group(g, replace(group, values=values))

    def map_lists(self, key: str, fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Self:
        """The batch with `fn(values, offsets) -> (values, offsets)` applied to the distinct lists of `key`.

        For what changes lengths: truncate, first-x, n-grams. Windows of the group are laid out as lists first.
        """
        g = self.group_of(key)
        kjt = self.group_kjt(g)
        if kjt.weights_or_none() is not None:
            raise ValueError(f"map_lists({key!r}): the lists have weights, which it cannot change along")
        group, stride = self._groups[g], kjt.stride()
        position = group.keys.index(key)
        parts = list(_cut_lists(kjt.values(), group.lengths_FU, len(group.keys)))
        values, lengths_U, _ = parts[position]
        offsets = torch.cat([lengths_U.new_zeros(1), lengths_U.cumsum(0)]).long()
        values, offsets = fn(values, offsets)
        if len(offsets) != stride + 1 or int(offsets[-1]) != len(values):
            raise ValueError(
                f"map_lists({key!r}): gave {len(offsets) - 1} lists and {len(values)} values, expected {stride} lists"
            )
        parts[position] = (values, offsets.diff().to(lengths_U.dtype), None)
        changed = replace(
            group,
            values=torch.cat([part[0] for part in parts]),
            lengths_FU=torch.cat([part[1] for part in parts]),
            num_stored=tuple(len(part[0]) for part in parts),
            starts_FU=None,
        )
        return self._with_group(g, changed)

    def size_in_bytes(self) -> int:
        """Every tensor that is stored or sent, the inverses and windows too."""
        return sum(tensor.nbytes for group in self._groups for tensor in group.tensors.values())

    def device(self) -> torch.device:
        return self._groups[0].values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        target = torch.device(device)
        return self._map_tensors(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        for group in self._groups:
            for tensor in group.tensors.values():
                tensor.record_stream(stream)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        groups = [group.map_tensors(change) for group in self._groups]
        return type(self)(self._keys, groups, stride=self._stride)

    def _with_group(self, g: int, group: GroupTensors) -> Self:
        groups = [*self._groups[:g], group, *self._groups[g + 1 :]]
        return type(self)(self._keys, groups, stride=self._stride)

    def __getstate__(self) -> dict[str, Any]:
        # A view would take its whole storage along; what group_kjt made can be made again.
        compact = self._map_tensors(lambda t: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t)
        return {"_keys": self._keys, "_groups": compact._groups, "_stride": self._stride, "_kjts": {}}

    def __repr__(self) -> str:
        lines = [
            f"InverseKeyedJaggedTensor({self._stride} samples, {len(self._keys)} features, "
            f"{self.dedup_factor():.2f}x deduplicated, {self.size_in_bytes()} bytes)"
        ]
        for position, group in enumerate(self._groups):
            rows = "plain" if group.inverse_B is None else f"{group.num_rows} distinct rows"
            windows = ", windows" if group.starts_FU is not None else ""
            lines.append(f"  {position}: {', '.join(group.keys)}: {rows}, {len(group.values)} values stored{windows}")
        return "\n".join(lines)


def _check_keys(groups: Sequence[Sequence[str]], windows: Sequence[str], known: dict[str, FeatureLists]) -> None:
    seen: set[str] = set()
    for key in [*(key for group in groups for key in group), *windows]:
        if key not in known:
            raise ValueError(f"unknown feature {key!r}; the batch has {', '.join(known)}")
    for group in groups:
        if not group or seen & set(group) or len(set(group)) != len(group):
            raise ValueError(f"groups: expected each feature once and no empty group, received {groups}")
        seen |= set(group)


def _select(lengths: Tensor, inverse_B: Tensor | None) -> Tensor:
    return lengths if inverse_B is None else lengths.index_select(-1, inverse_B)


def _cut_lists(
    values: Tensor, lengths: Tensor, num_keys: int, weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The values, lengths and weights of each key of a key-major jagged tensor."""
    by_key = lengths.view(num_keys, lengths.numel() // num_keys)
    sizes = by_key.sum(1).tolist()
    cut = [None] * num_keys if weights is None else torch.split(weights, sizes)
    return list(zip(torch.split(values, sizes), by_key, cut, strict=True))


def _expand_group(group: GroupTensors) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The lists of every sample, for each feature of the group."""
    num_keys = len(group.keys)
    if group.inverse_B is None and group.starts_FU is None:
        return _cut_lists(group.values, group.lengths_FU, num_keys, group.weights)
    shape = (num_keys, group.num_rows)
    lengths_FB = _select(group.lengths_FU.view(shape), group.inverse_B).reshape(-1)
    starts_FB = _select(group.list_starts_FU().view(shape), group.inverse_B).reshape(-1)
    values = take_windows(group.values, starts_FB, lengths_FB.long())
    weights = None if group.weights is None else take_windows(group.weights, starts_FB, lengths_FB.long())
    return _cut_lists(values, lengths_FB, num_keys, weights)
