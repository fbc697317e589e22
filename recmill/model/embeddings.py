"""The sparse half of the model: TorchRec collections over all tables of a schema.

pooled     tables whose features arrive as one list per sample: bags at stride B
distinct   tables whose features arrive deduplicated: bags at stride U, expanded after the lookup
sequence   tables that a sequence feature reads: rows, pooled or padded after the lookup
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor

from kernels import distinct_keys, expand_rows
from recmill.artifacts import module_name
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor
from recmill.data.schema import Schema
from recmill.data.tables import SHAPES, logical_names, table_shapes
from recmill.model.encoders.windows import SequenceWindows

# B = batch, U = distinct rows of a feature (B if not deduplicated), L = padded length, D = embedding width
INIT_BLOCK_ROWS = 65_536  # rows are initialised in blocks of this size, so any shard can initialise its own

# TorchRec asks torch in a way that makes it print advice to TorchRec's authors on the caller's terminal.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

Ids = Any  # KeyedJaggedTensor | InverseKeyedJaggedTensor; TorchRec is untyped, so a union would say no more


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """The rows of a batch, still over distinct rows where the batch is deduplicated."""

    pooled: dict[str, Tensor] = field(default_factory=dict)  # sparse feature -> [U, D]
    sequences: dict[str, SequenceWindows] = field(default_factory=dict)  # sequence feature -> its U sequences
    inverse: dict[str, Tensor] = field(default_factory=dict)  # deduplicated feature -> [B], sample to distinct row


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A collection and the features that it looks up. Not a module: DDP must not see our own stores."""

    features: list[str]
    lookup: Callable[[KeyedJaggedTensor], Any]
    once: frozenset[str] = frozenset()  # features whose ids are each sent once per batch


class TableEmbeddings(nn.Module):
    """Looks up every id feature of a batch: pooled vectors for sparse features, windows of rows for sequences.

    Tables stay on the meta device unless one is given: sharding materialises only what a rank holds. `deduplicated`
    names the features that arrive as distinct rows; the result is the same, with each row looked up once. TorchRec does
    not hold the tables in `elsewhere`: `attach` adds the collections that do, and collections for batches
    that read hot rows only; their ids are slots of the hot set. `repeated_ids` names features of sequence tables whose
    ids TorchRec looks up once per batch instead of once per list element.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        max_sequence_length: int,
        deduplicated: frozenset[str] = frozenset(),
        elsewhere: frozenset[str] = frozenset(),
        repeated_ids: frozenset[str] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.schema, self.repeated_ids = schema, repeated_ids
        self.max_sequence_length = max_sequence_length
        self.configs = table_shapes(schema, deduplicated)
        self.distinct_features = _features_of(self.configs["distinct"])
        self.row_features = [f.name for f in schema.id_features if f.table in schema.sequence_tables]
        where, names = device or torch.device("meta"), logical_names(schema)
        mine = {
            shape: [config for config in configs if names[config.name] not in elsewhere]
            for shape, configs in self.configs.items()
        }
        self.pooled = EmbeddingBagCollection(tables=mine["pooled"], device=where) if mine["pooled"] else None
        self.distinct = EmbeddingBagCollection(tables=mine["distinct"], device=where) if mine["distinct"] else None
        self.sequence = EmbeddingCollection(tables=mine["sequence"], device=where) if mine["sequence"] else None
        self._mine = {shape: _features_of(configs) for shape, configs in mine.items()}
        self.shared_arrays: tuple[Any, ...] = ()  # the array of tables that share parameters, once attached
        self._attached: dict[str, list[_Source]] = {shape: [] for shape in SHAPES}
        self._hot: dict[str, list[_Source]] = {shape: [] for shape in SHAPES}
        self._ahead: deque[tuple[Ids, _CollectionInputs]] = deque()  # batches whose rows are being read from disk

    def attach(
        self, shape: str, tables: Sequence[str], lookup: Callable[[KeyedJaggedTensor], Any], *, is_hot: bool = False
    ) -> None:
        """Let a collection look up these tables of a shape (pooled, distinct or sequence), or do so in hot batches."""
        wanted = {module_name(table) for table in tables}
        features = _features_of([config for config in self.configs[shape] if config.name in wanted])
        (self._hot if is_hot else self._attached)[shape].append(_Source(features=features, lookup=lookup))

    def _sources(self, shape: str, *, is_hot: bool) -> list[_Source]:
        if is_hot:
            return self._hot[shape]
        own = getattr(self, shape)
        once = self.repeated_ids if shape == "sequence" else frozenset()
        mine = [] if own is None else [_Source(features=self._mine[shape], lookup=own, once=once)]
        return [*mine, *self._attached[shape]]

    def table_weights(self) -> dict[str, Tensor]:
        """Table name -> weight, for unsharded collections."""
        names = logical_names(self.schema)
        return {names[path.split(".")[-2]]: parameter.data for path, parameter in self.named_parameters()}

    def prefetch(self, ids: Ids) -> None:
        """Let collections on disk start reading a coming batch; batches must then arrive in this order."""
        batch = _CollectionInputs(ids, self.schema)
        for shape in SHAPES:
            for source in self._attached[shape]:
                if (start := getattr(source.lookup, "prefetch", None)) is not None:
                    start(batch.of_shape(shape, source.features))
        self._ahead.append((ids, batch))

    def forward(self, ids: Ids, is_hot: bool = False) -> LookedUp:
        is_ahead = bool(self._ahead) and self._ahead[0][0] is ids
        batch = self._ahead.popleft()[1] if is_ahead else _CollectionInputs(ids, self.schema)
        # Start all lookups before waiting for any: sharded collections return an awaitable.
        bags, shared, found = (
            [
                (source, source.lookup(batch.of_shape(shape, source.features, once=source.once)))
                for source in self._sources(shape, is_hot=is_hot)
            ]
            for shape in ("pooled", "distinct", "sequence")
        )
        if is_hot:
            self._tell_hot("send_sizes")
        pooled: dict[str, Tensor] = {name: vectors for _, bag in bags for name, vectors in bag.to_dict().items()}
        for _, answer in shared:
            for name, vectors in answer.to_dict().items():
                pooled[name] = vectors[: batch.ids.num_distinct(batch.ids.group_of(name))]
        rows = {name: batch.unfold(name, answer[name]) for source, answer in found for name in source.features}
        inverse: dict[str, Tensor] = {}
        sequences: dict[str, SequenceWindows] = {}
        for name in self.row_features:
            feature = self.schema.feature(name)
            if feature.kind == "sequence":
                sequences[name] = self._windows(batch, name, rows[name])
            else:
                lists = JaggedTensor(values=rows[name], lengths=batch.ids.lists(name)[1])
                pooled[name] = pool_rows(lists, is_mean=feature.pooling == "mean")
        for name in (*self.distinct_features, *self.row_features):
            group = batch.ids.group_of(name)
            if not batch.ids.is_plain(group):
                inverse[name] = batch.ids.inverse(group)
        return LookedUp(pooled=pooled, sequences=sequences, inverse=inverse)

    def end_forward(self) -> None:
        """Let collections send what they know by the end of the forward pass."""
        self._tell_hot("send_ids")

    def _tell_hot(self, message: str) -> None:
        for source in (own for sources in self._hot.values() for own in sources):
            if (send := getattr(source.lookup, message, None)) is not None:
                send()

    def _windows(self, batch: _CollectionInputs, name: str, rows_ND: Tensor) -> SequenceWindows:
        window = batch.ids.windows(name)
        if window is None:
            return SequenceWindows.of_lists(rows_ND, batch.ids.lists(name)[1], max_length=self.max_sequence_length)
        found = SequenceWindows(rows_ND=rows_ND, starts_U=window[1], lengths_U=window[2])
        return found.last(self.max_sequence_length)


def _features_of(configs: Sequence[Any]) -> list[str]:
    return [name for config in configs for name in config.feature_names]


def looked_up_ids(ids: Ids, schema: Schema, name: str) -> Tensor:
    """The ids that a batch looks up for a feature of a sequence table: of its lists, or of its buffer of windows."""
    batch = _CollectionInputs(ids, schema).ids
    window = batch.windows(name)
    return batch.lists(name)[0] if window is None else window[0]


class _CollectionInputs:
    """The KeyedJaggedTensors that the collections receive for a batch, each created once."""

    def __init__(self, ids: Ids, schema: Schema) -> None:
        self.ids = InverseKeyedJaggedTensor.from_plain(ids) if isinstance(ids, KeyedJaggedTensor) else ids
        self.schema = schema
        self.made: dict[tuple[str, ...], KeyedJaggedTensor] = {}
        self.places: dict[str, Tensor] = {}  # features whose ids are sent once: the position of each element's id

    def of_shape(self, shape: str, names: list[str], *, once: frozenset[str] = frozenset()) -> KeyedJaggedTensor:
        """Features in the form that a collection of this shape expects; repeated calls return the same object."""
        key = (shape, *names)
        if key not in self.made:
            is_rows = shape == "sequence"
            self.made[key] = (
                self.expanded(names) if shape == "pooled" else self.aligned(names, windows=is_rows, once=once)
            )
        return self.made[key]

    def unfold(self, name: str, rows: JaggedTensor) -> Tensor:
        """One row per element of the lists or of the buffer of windows, from the rows that the table returned."""
        values: Tensor = rows.values()
        return expand_rows(values, self.places[name]) if name in self.places else values

    def expanded(self, names: list[str]) -> KeyedJaggedTensor:
        """Features with one list per sample."""
        groups = {self.ids.group_of(name): name for name in names}
        for group, name in groups.items():
            if not self.ids.is_plain(group):
                raise ValueError(
                    f"feature {name!r} arrives deduplicated, but the model was built for one list per sample"
                )
        return _pick(self.ids.group_kjt(next(iter(groups))), names) if len(groups) == 1 else self.aligned(names)

    def aligned(
        self, names: list[str], *, windows: bool = False, once: frozenset[str] = frozenset()
    ) -> KeyedJaggedTensor:
        """Features with different numbers of rows in one KeyedJaggedTensor: shorter ones are padded with empty lists.

        TorchRec's collections require one stride. An empty list costs nothing in a row lookup and a zero vector in a
        bag. A feature stored as windows sends its buffer as one list; a feature in `once` sends its distinct ids.
        """
        values, lengths = [], []
        stride = max((self.ids.num_distinct(self.ids.group_of(name)) for name in names), default=0)
        for name in names:
            window = self.ids.windows(name) if windows else None
            feature_values, feature_lengths = self.ids.lists(name) if window is None else (window[0], None)
            if name in once and not feature_values.is_cuda:  # on CUDA the host would wait; TorchRec deduplicates there
                feature_values, self.places[name] = distinct_keys(
                    feature_values, bound=self.schema.feature(name).num_rows
                )
                feature_lengths = None
            if feature_lengths is None:  # one list
                feature_lengths = feature_values.new_tensor([len(feature_values)], dtype=torch.int32)
            values.append(feature_values)
            short = max(stride, 1) - len(feature_lengths)
            lengths.append(nn.functional.pad(feature_lengths.int(), (0, short)) if short else feature_lengths.int())
        return KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=torch.cat(lengths))


def _pick(ids: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    keys = ids.keys()
    return ids if keys == names else ids.permute([keys.index(name) for name in names])


def pool_rows(rows: JaggedTensor, *, is_mean: bool) -> Tensor:
    """Sum or mean of each sample's rows: [B, D]."""
    lengths, values = rows.lengths(), rows.values()
    # One id per sample, as in most sparse features, is its own sum. (On CUDA the check would make the host wait.)
    if not values.is_cuda and len(values) == len(lengths) and bool((lengths == 1).all()):
        return values
    owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, owners, values)
    return total / lengths.clamp(min=1)[:, None].to(total.dtype) if is_mean else total


def initial_rows(table: str, *, start: int, stop: int, dim: int, scale: float, seed: int) -> Tensor:
    """Initial values of rows [start, stop) of a table: the same for every run with this seed, on any rank."""
    blocks = []
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = torch.Generator().manual_seed(_block_seed(table, block, seed))
        first = block * INIT_BLOCK_ROWS
        # Numbers are drawn in sequence: those after the last requested row need not be drawn.
        rows = torch.empty(min(stop - first, INIT_BLOCK_ROWS), dim).uniform_(-scale, scale, generator=generator)
        blocks.append(rows[max(start - first, 0) : min(stop - first, INIT_BLOCK_ROWS)])
    return torch.cat(blocks) if blocks else torch.empty(0, dim)


def _block_seed(table: str, block: int, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
