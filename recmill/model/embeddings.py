"""The sparse half of the model: TorchRec collections over all tables of a schema.

pooled     tables whose features come one list a sample: bags at stride B
distinct   tables whose features come deduplicated: bags at stride U, expanded after the lookup
sequence   tables that some sequence feature reads: rows, pooled or padded after the lookup
"""

from __future__ import annotations

import hashlib
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

# B = batch, U = distinct rows of a feature (B where nothing is deduplicated), L = padded length, D = embedding width
INIT_BLOCK_ROWS = 65_536  # rows are drawn in blocks of this size, so any shard can draw its own rows

Ids = Any  # KeyedJaggedTensor | InverseKeyedJaggedTensor; TorchRec is untyped, so a union would say no more


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """What the tables gave for a batch, still over distinct rows where the batch is deduplicated."""

    pooled: dict[str, Tensor] = field(default_factory=dict)  # sparse feature -> [U, D]
    sequences: dict[str, SequenceWindows] = field(default_factory=dict)  # sequence feature -> its U sequences
    inverse: dict[str, Tensor] = field(default_factory=dict)  # deduplicated feature -> [B], sample to distinct row


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A collection and the features it answers for. Not a module: what we hold ourselves is no business of DDP's."""

    features: list[str]
    lookup: Callable[[KeyedJaggedTensor], Any]
    once: frozenset[str] = frozenset()  # features whose every id is sent once a batch


class TableEmbeddings(nn.Module):
    """Looks up every id feature of a batch: pooled vectors for sparse features, windows of rows for sequences.

    Tables stay on the meta device unless one is given: sharding materialises only what a rank holds. `deduplicated`
    names the features that arrive as distinct rows; what they give is the same, each row looked up once. Tables named
    in `elsewhere` are not TorchRec's: `attach` brings the collections that hold them. `attach_hot` brings collections
    for batches that touch hot rows only; their ids are slots of the hot set. `repeated_ids` names features of tables
    that sequences read: TorchRec looks up each of their ids once a batch, not once an element of a list.
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
        self.shared_arrays: tuple[Any, ...] = ()  # the one of tables that share parameters, once it is attached
        self._attached: dict[str, list[_Source]] = {shape: [] for shape in SHAPES}
        self._hot: dict[str, list[_Source]] = {shape: [] for shape in SHAPES}
        self._ahead: deque[tuple[Ids, _CollectionInputs]] = deque()  # batches whose rows are being read from disk

    def attach(self, shape: str, tables: Sequence[str], lookup: Callable[[KeyedJaggedTensor], Any]) -> None:
        """Let a collection answer for these tables of a shape (pooled, distinct or sequence)."""
        self._attached[shape].append(_Source(features=self._readers(shape, tables), lookup=lookup))

    def attach_hot(self, shape: str, tables: Sequence[str], lookup: Callable[[KeyedJaggedTensor], Any]) -> None:
        """Let a collection answer for these tables of a shape in hot batches."""
        self._hot[shape].append(_Source(features=self._readers(shape, tables), lookup=lookup))

    def _readers(self, shape: str, tables: Sequence[str]) -> list[str]:
        wanted = {module_name(table) for table in tables}
        return _features_of([config for config in self.configs[shape] if config.name in wanted])

    def _sources(self, shape: str, *, is_hot: bool) -> list[_Source]:
        if is_hot:
            return self._hot[shape]
        own = getattr(self, shape)
        once = self.repeated_ids if shape == "sequence" else frozenset()
        mine = [] if own is None else [_Source(features=self._mine[shape], lookup=own, once=once)]
        return [*mine, *self._attached[shape]]

    def table_weights(self) -> dict[str, Tensor]:
        """Every table's weight by the table's name (of an unsharded collection)."""
        names = logical_names(self.schema)
        return {names[path.split(".")[-2]]: parameter.data for path, parameter in self.named_parameters()}

    def prefetch(self, ids: Ids) -> None:
        """Let collections that read from disk start on a coming batch; batches then come in this order."""
        batch = _CollectionInputs(ids, self.schema)
        for shape in SHAPES:
            for source in self._attached[shape]:
                if (start := getattr(source.lookup, "prefetch", None)) is not None:
                    start(batch.of_shape(shape, source.features))
        self._ahead.append((ids, batch))

    def forward(self, ids: Ids, is_hot: bool = False) -> Lookups:
        is_ahead = bool(self._ahead) and self._ahead[0][0] is ids
        batch = self._ahead.popleft()[1] if is_ahead else _CollectionInputs(ids, self.schema)
        # All lookups start before any is waited for: sharded collections answer with an awaitable.
        bags, shared, found = (
            [
                (source, source.lookup(batch.of_shape(shape, source.features, once=source.once)))
                for source in self._sources(shape, is_hot=is_hot)
            ]
            for shape in ("pooled", "distinct", "sequence")
        )
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
        return Lookups(pooled=pooled, sequences=sequences, inverse=inverse)

    def _windows(self, batch: _CollectionInputs, name: str, rows_ND: Tensor) -> SequenceWindows:
        window = batch.ids.windows(name)
        if window is None:
            return SequenceWindows.of_lists(rows_ND, batch.ids.lists(name)[1], max_length=self.max_sequence_length)
        found = SequenceWindows(rows_ND=rows_ND, starts_U=window[1], lengths_U=window[2])
        return found.last(self.max_sequence_length)


def _features_of(configs: Sequence[Any]) -> list[str]:
    return [name for config in configs for name in config.feature_names]


def looked_up_ids(ids: Ids, schema: Schema, name: str) -> Tensor:
    """The ids that a batch has for a feature of a table that sequences read: of its lists, or of what windows share."""
    batch = _CollectionInputs(ids, schema).ids
    window = batch.windows(name)
    return batch.lists(name)[0] if window is None else window[0]


class _CollectionInputs:
    """The KeyedJaggedTensors that the collections take for a batch, each made once."""

    def __init__(self, ids: Ids, schema: Schema) -> None:
        self.ids = InverseKeyedJaggedTensor.from_plain(ids) if isinstance(ids, KeyedJaggedTensor) else ids
        self.schema = schema
        self.made: dict[tuple[str, ...], KeyedJaggedTensor] = {}
        self.places: dict[str, Tensor] = {}  # of features whose ids are sent once: where each element's id is

    def of_shape(self, shape: str, names: list[str], *, once: frozenset[str] = frozenset()) -> KeyedJaggedTensor:
        """Features as a collection of this shape wants them; the same object when it is asked again."""
        key = (shape, *names)
        if key not in self.made:
            is_rows = shape == "sequence"
            self.made[key] = (
                self.expanded(names) if shape == "pooled" else self.aligned(names, windows=is_rows, once=once)
            )
        return self.made[key]

    def unfold(self, name: str, rows: JaggedTensor) -> Tensor:
        """A row for each element of the lists, or of the buffer of windows, from what the table gave for them."""
        values: Tensor = rows.values()
        return expand_rows(values, self.places[name]) if name in self.places else values

    def expanded(self, names: list[str]) -> KeyedJaggedTensor:
        """Features at one list a sample."""
        groups = {self.ids.group_of(name): name for name in names}
        for group, name in groups.items():
            if not self.ids.is_plain(group):
                raise ValueError(f"feature {name!r} arrives deduplicated, the model was built for one list a sample")
        return _pick(self.ids.group_kjt(next(iter(groups))), names) if len(groups) == 1 else self.aligned(names)

    def aligned(
        self, names: list[str], *, windows: bool = False, once: frozenset[str] = frozenset()
    ) -> KeyedJaggedTensor:
        """Features of different numbers of rows in one KeyedJaggedTensor: shorter ones end in empty lists.

        TorchRec's collections want one stride. An empty list costs nothing in a row lookup and a zero vector in a bag.
        A feature stored as windows sends its buffer as one list, and one of `once` its distinct ids.
        """
        values, lengths = [], []
        stride = max((self.ids.num_distinct(self.ids.group_of(name)) for name in names), default=0)
        for name in names:
            window = self.ids.windows(name) if windows else None
            feature_values, feature_lengths = self.ids.lists(name) if window is None else (window[0], None)
            if name in once and not feature_values.is_cuda:  # where the host would wait; TorchRec has its own way there
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
    # One id a sample, as most sparse features have, is its own sum. (On CUDA the host would wait for the answer.)
    if not values.is_cuda and len(values) == len(lengths) and bool((lengths == 1).all()):
        return values
    owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, owners, values)
    return total / lengths.clamp(min=1)[:, None].to(total.dtype) if is_mean else total


def initial_rows(table: str, *, start: int, stop: int, dim: int, scale: float, seed: int) -> Tensor:
    """Rows [start, stop) of a table as every run with this seed starts them, whoever holds them."""
    blocks = []
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = torch.Generator().manual_seed(_block_seed(table, block, seed))
        first = block * INIT_BLOCK_ROWS
        # Numbers are drawn one after another: what lies behind the last row wanted need not be drawn.
        rows = torch.empty(min(stop - first, INIT_BLOCK_ROWS), dim).uniform_(-scale, scale, generator=generator)
        blocks.append(rows[max(start - first, 0) : min(stop - first, INIT_BLOCK_ROWS)])
    return torch.cat(blocks) if blocks else torch.empty(0, dim)


def _block_seed(table: str, block: int, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
