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
    FeatureLists,
    GroupTensors,
    build_group,
    check_groups,
    choose_groups,
    expand_group,
    lists_of_arrow,
    lists_of_kjt,
    select_rows,
)
from recmill.data.ikjt.distinct import MIN_FACTOR, group_keys
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

    Histories that shift are windows into one buffer, whether their rows repeat or not:

        rows:      [a, b, c, d]   [b, c, d, e]
        values   = [a, b, c, d, e]     (start, length) = (0, 4), (1, 4)

    A group that repeats too little to pay is plain: one row per sample, no inverse, nothing copied if it has a single
    feature, and `expand` returns its argument. Weights, if any, are part of a row.
    """

    def __init__(self, keys: Sequence[str], groups: Sequence[GroupTensors], *, stride: int) -> None:
        """From finished groups; `keys` is the order of the features in `to_kjt()`."""
        grouped = [key for group in groups for key in group.keys]
        self._group_of = {key: position for position, group in enumerate(groups) for key in group.keys}
        if len(grouped) != len(keys) or self._group_of.keys() != set(keys):
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
    def _from_lists(
        cls,
        features: Sequence[FeatureLists],
        groups: Sequence[Sequence[str]] | None,
        windows: Sequence[str],
        min_factor: float,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> Self:
        by_key = {feature.key: feature for feature in features}
        if len(by_key) != len(features) or not features:
            raise ValueError(f"expected features of different names, received {[feature.key for feature in features]}")
        if groups is None:
            groups = choose_groups(features)
        check_groups(groups, windows, known=by_key)
        stored = [
            build_group(
                [by_key[key] for key in group],
                min_factor=min_factor,
                use_windows=any(key in windows for key in group),
                lengths_dtype=lengths_dtype,
            )
            for group in group_keys(list(by_key), groups)
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
    ) -> Self:
        """Deduplicate a KeyedJaggedTensor.

        `groups` says which features share an inverse, [["a", "b"], ["c"]]. A feature in no group gets its own; None
        finds the groups by comparing all features (do that once and reuse `.groups`). `windows` names the features
        whose lists shift. A group stays plain unless it holds at least `min_factor` times the values it would store.
        """
        return cls._from_lists(lists_of_kjt(kjt), groups, windows, min_factor, kjt.lengths().dtype)

    @classmethod
    def from_plain(cls, kjt: KeyedJaggedTensor) -> Self:
        """A KeyedJaggedTensor as one plain group: nothing is compared or copied."""
        keys = kjt.keys()
        whole = GroupTensors(
            keys=tuple(keys),
            values=kjt.values(),
            weights=kjt.weights_or_none(),
            lengths_FU=kjt.lengths(),
            num_stored=tuple(kjt.length_per_key()),
        )
        found = cls(keys, [whole] if keys else [], stride=kjt.stride())
        found._kjts[0] = kjt
        return found

    @classmethod
    def from_arrow(
        cls, batch: pa.RecordBatch | pa.Table, schema: Schema, *, groups: Sequence[Sequence[str]] | None = None
    ) -> Self:
        """Deduplicate the id features of `schema` straight from Arrow's buffers.

        Groups default to those of the schema (`Feature.group`); features that `shift` become windows.
        """
        if groups is None:
            by_group: dict[str, list[str]] = {}
            for feature in schema.id_features:
                by_group.setdefault(feature.group or f"/{feature.name}", []).append(feature.name)
            groups = list(by_group.values())
        lists = [lists_of_arrow(batch, feature.name) for feature in schema.id_features]
        return cls._from_lists(lists, groups, [f.name for f in schema.id_features if f.shift], MIN_FACTOR)

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
        if key not in self._group_of:
            raise ValueError(f"unknown feature {key!r}; the batch has {', '.join(self._keys)}")
        return self._group_of[key]

    def is_plain(self, g: int) -> bool:
        """Whether group `g` holds one row per sample because it repeats too little."""
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

    def lists(self, key: str) -> tuple[Tensor, Tensor]:
        """`(values, lengths_U)` of the distinct lists of `key`, one after another."""
        kjt = self.group_kjt(self.group_of(key))
        # Not `to_dict()`, which would split all features.
        position, edges, stride = kjt.keys().index(key), kjt.offset_per_key(), kjt.stride()
        values = kjt.values()[edges[position] : edges[position + 1]]
        return values, kjt.lengths()[position * stride : (position + 1) * stride]

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
        """The batch before deduplication: every list of every sample."""
        lists: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        for group in self._groups:
            lists.update(zip(group.keys, expand_group(group), strict=True))
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
        """Values of the batch per stored value, for one feature or for all."""
        before = after = 0
        for group in self._groups:
            lengths_FU = group.lengths_FU.view(len(group.keys), group.num_rows)
            for position, name in enumerate(group.keys):
                if key is None or name == key:
                    lengths_U = lengths_FU[position]
                    before += int(select_rows(lengths_U, group.inverse_B).sum())
                    after += group.num_stored[position]
        if key is not None and not after:
            return self._stride / max(1, self.num_distinct(self.group_of(key))) if self._stride else 1.0
        return before / after if after else 1.0

    def map_values(self, key: str, fn: Callable[[Tensor], Tensor]) -> Self:
        """The batch with `fn` applied to the stored values of `key`; `fn` must map each value by itself."""
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
                f"map_values({key!r}): returned {mapped.dtype}, the rest of its group is {group.values.dtype}"
            )
        pieces[position] = mapped
        changed = replace(group, values=torch.cat(pieces) if len(pieces) > 1 else mapped)
        return type(self)(self._keys, [*self._groups[:g], changed, *self._groups[g + 1 :]], stride=self._stride)

    def size_in_bytes(self) -> int:
        """Bytes of all tensors, including inverses and windows."""
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

    def __getstate__(self) -> dict[str, Any]:
        # A view would pickle its whole storage; the results of group_kjt can be made again.
        compact = self._map_tensors(lambda t: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t)
        return vars(compact) | {"_kjts": {}}

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
