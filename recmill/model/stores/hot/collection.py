"""The most read rows of all tables on every rank, so that batches which read nothing else exchange no rows.

    slot of table t:      0     1     2   ...        hot_rows[t][slot] = the row's id
    rank 0 holds        [w0]  [w1]  [w2]             in FBGEMM tables of its own
    rank 1 holds        [w0]  [w1]  [w2]             the same bits

A hot batch holds slots instead of ids (recmill/data/hot/layout.py). Its lookups are local; its gradients are gathered
and applied by all ranks (hot_sync.py). Between hot and cold batches rows move from and to whatever holds the tables:

    hot.enter(stores)      # weights and optimiser state of the hot rows come in
    ... hot batches ...
    hot.leave(stores)      # and go back
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, PoolingType

from recmill.artifacts import InputError, module_name
from recmill.model.stores.hot.sync import SYNCS, PendingUpdate
from recmill.model.stores.hot.tables import FusedTables
from recmill.model.stores.interface import Replica, TableOptimiser, TableStore

# F = features, B = samples, N = ids, H = hot rows of a table, D = embedding width
TableConfig = Any  # EmbeddingBagConfig | EmbeddingConfig; TorchRec is untyped, so a union would say no more


class _Lookup(torch.autograd.Function):
    """Local rows forward; backward hands the gradients to the update of all ranks, so no table needs a gradient.

    Pooled rows [B, F * D] leave as one [B, D] a feature, so that their gradients come back without being joined.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: Tensor, width: int, pending: PendingUpdate) -> tuple[Tensor, ...]:
        ctx.pending = pending
        return torch.split(found, width, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.pending.apply(gradients)
        return None, None, None, None


@runtime_checkable
class Refreshes(Protocol):
    """A TableStore that brings copies of its rows up to date at once, sending only what changed."""

    def refresh(self, replicas: Mapping[str, Replica]) -> None: ...


class PooledRows:
    """What pooled tables gave for a batch."""

    def __init__(self, vectors: dict[str, Tensor]) -> None:
        self._vectors = vectors

    def to_dict(self) -> dict[str, Tensor]:
        """Feature -> [B, D]."""
        return self._vectors


class _Group:
    """The tables of one width and pooling: one FBGEMM module, one exchange a step."""

    def __init__(self, configs: Sequence[TableConfig], hot_rows: Sequence[Tensor], **options: Any) -> None:
        self.features = [name for config in configs for name in config.feature_names]
        table_of_feature = [table for table, config in enumerate(configs) for _ in config.feature_names]
        self.tables = FusedTables([len(rows) for rows in hot_rows], table_of_feature, **options)

    def start(self, ids_N: Tensor, lengths_FB: Tensor, *, sync: str, group: Any) -> tuple[Tensor, PendingUpdate | None]:
        offsets = ids_N.new_zeros(len(lengths_FB) + 1, dtype=torch.int64)
        torch.cumsum(lengths_FB, 0, out=offsets[1:])
        pending = None
        if torch.is_grad_enabled():
            pending = PendingUpdate(self.tables, ids_N, lengths_FB, offsets, sync=sync, group=group)
        return self.tables.look_up(ids_N, offsets), pending


class HotEmbeddingCollection(nn.Module):
    """Replicated hot rows of tables that are all pooled (EmbeddingBagConfig) or all looked up by row (EmbeddingConfig).

    `hot_rows` maps a table to the ids of its hot rows in the order of their slots. Called with a KeyedJaggedTensor of
    slots it answers as TorchRec's collections do: pooled with `.to_dict()`, otherwise a dict feature -> JaggedTensor.
    Nothing here is a parameter: the rows update themselves in the backward pass, equally on all ranks.

    `sync`: "raw" is equal to the last bit to training one whole table; "reduced" sends less where rows repeat in a
    batch and agrees to float32 rounding (see hot_sync.py).
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        hot_rows: Mapping[str, Tensor],
        *,
        optimiser: TableOptimiser,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sync: str = "raw",
    ) -> None:
        super().__init__()
        if sync not in SYNCS:
            raise InputError(f"sync is {sync!r}, expected one of {', '.join(SYNCS)}")
        kinds = {isinstance(config, EmbeddingBagConfig) for config in tables}
        if len(kinds) != 1:
            raise InputError("expected tables that are all pooled or all looked up row by row, received both or none")
        self.is_pooled = kinds.pop()
        self.sync, self.process_group = sync, process_group
        self.device = device or torch.device("cpu")
        self.hot_rows = {name: rows.to(torch.int64) for name, rows in _by_config(tables, hot_rows).items()}
        self.features = [name for config in tables for name in config.feature_names]
        self._table_of = {
            feature: name
            for config, name in zip(tables, self.hot_rows, strict=True)
            for feature in config.feature_names
        }
        options: dict[str, Any] = {"optimiser": optimiser, "device": self.device}
        groups, place = _group_tables(tables, self.hot_rows, options)
        for group in groups:
            group.tables.clear()  # equal on all ranks from the start
        # Plain attributes, wrapped in tuples: DDP and checkpoints of the model must not see the rows.
        self._groups, self._place = tuple(groups), place
        self.anchor = torch.zeros((), requires_grad=True)  # not a Parameter: it only makes autograd call us

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that begin from now on."""
        for group in self._groups:
            group.tables.set_lr(lr)

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical names of the tables whose hot rows are held here."""
        return tuple(self.hot_rows)

    @property
    def num_bytes(self) -> int:
        """What one rank holds: rows and optimiser state."""
        return sum(
            tensor.nbytes
            for name in self.tables
            for tensor in (self.weights(name), *self.optimiser_state(name).values())
        )

    def weights(self, table: str) -> Tensor:
        """[H, D] in slot order, a view of the live rows."""
        group, position = self._place[table]
        return group.tables.weights(position)[: len(self.hot_rows[table])]

    def optimiser_state(self, table: str) -> dict[str, Tensor]:
        """State name -> [H] or [H, D] in slot order, views of the live state."""
        group, position = self._place[table]
        return {name: live[: len(self.hot_rows[table])] for name, live in group.tables.state(position).items()}

    def table_of(self, feature: str) -> str:
        """The table that a feature reads."""
        return self._table_of[feature]

    def is_mean(self, feature: str) -> bool:
        return self._place[self._table_of[feature]][0].tables.pooling == "mean"

    def enter(self, stores: Sequence[TableStore]) -> None:
        """Fetch the hot rows and their optimiser state from the stores that hold them. All ranks call it together."""
        replicas: dict[int, dict[str, Replica]] = {}
        for table, store in self._held_by(stores):
            if isinstance(store, Refreshes):
                replicas.setdefault(id(store), {})[table] = self._replica(table)
                continue
            own = self._replica(table)
            found, found_state = store.gather_rows(table, own.rows_H)
            own.weights_HD.copy_(found)
            for name, live in own.state.items():
                live.copy_(found_state[name].reshape(live.shape))
        for store in stores:
            if isinstance(store, Refreshes) and id(store) in replicas:
                store.refresh(replicas[id(store)])

    def leave(self, stores: Sequence[TableStore]) -> None:
        """Write the hot rows and their optimiser state back. Every rank has them, so nothing is exchanged."""
        for table, store in self._held_by(stores):
            own = self._replica(table)
            store.put_rows(table, own.rows_H, own.weights_HD, own.state)

    def _replica(self, table: str) -> Replica:
        return Replica(rows_H=self.hot_rows[table], weights_HD=self.weights(table), state=self.optimiser_state(table))

    def _held_by(self, stores: Sequence[TableStore]) -> Iterator[tuple[str, TableStore]]:
        for table, rows in self.hot_rows.items():
            holders = [store for store in stores if table in store.tables]
            if len(holders) != 1:
                raise ValueError(f"table {table!r} is held by {len(holders)} of the given stores, expected 1")
            if len(rows):
                yield table, holders[0]

    def forward(self, slots: KeyedJaggedTensor) -> Any:
        num_bags = slots.stride()
        lengths_FB = slots.lengths()
        keys = slots.keys()
        edges = slots.offset_per_key()
        started = []
        for group in self._groups:
            values, lengths = _features_of(slots, keys, edges, lengths_FB, num_bags, group.features)
            started.append((lengths, *group.start(values, lengths, sync=self.sync, group=self.process_group)))
        found: dict[str, Any] = {}
        for group, (lengths, rows, pending) in zip(self._groups, started, strict=True):
            pieces = torch.split(rows, group.tables.dim, dim=1)
            if pending is not None:
                pending.send_ids()
                pieces = _Lookup.apply(self.anchor, rows, group.tables.dim, pending)  # type: ignore[no-untyped-call]
            found |= self._answer(group, pieces, lengths, num_bags)
        ordered = {name: found[name] for name in self.features}
        return PooledRows(ordered) if self.is_pooled else ordered

    def _answer(self, group: _Group, found: tuple[Tensor, ...], lengths_FB: Tensor, num_bags: int) -> dict[str, Any]:
        if self.is_pooled:
            return dict(zip(group.features, found, strict=True))
        lengths = lengths_FB.view(len(group.features), num_bags)
        counts = lengths.sum(1).tolist()
        pieces = zip(group.features, torch.split(found[0], counts), lengths, strict=True)
        return {name: JaggedTensor(values=values, lengths=own) for name, values, own in pieces}


def _by_config(tables: Sequence[TableConfig], hot_rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hot rows by logical table name, in the order of the configs."""
    logical = {module_name(name): name for name in hot_rows} | {name: name for name in hot_rows}
    found: dict[str, Tensor] = {}
    for config in tables:
        if config.name not in logical:
            raise InputError(f"table {config.name!r} has no hot rows; there are rows of {', '.join(hot_rows)}")
        name = logical[config.name]
        rows = hot_rows[name]
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < config.num_embeddings:
            raise InputError(f"table {name!r}: hot rows must lie in [0, {config.num_embeddings})")
        found[name] = rows
    return found


def _group_tables(
    tables: Sequence[TableConfig], hot_rows: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[list[_Group], dict[str, tuple[_Group, int]]]:
    """One group a width and pooling, and where each table is."""
    shapes: dict[tuple[int, str], list[tuple[TableConfig, str]]] = {}
    for config, name in zip(tables, hot_rows, strict=True):
        pooling = "none"
        if isinstance(config, EmbeddingBagConfig):
            pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
        shapes.setdefault((config.embedding_dim, pooling), []).append((config, name))
    groups: list[_Group] = []
    place: dict[str, tuple[_Group, int]] = {}
    for (dim, pooling), members in shapes.items():
        rows = [hot_rows[name] for _, name in members]
        group = _Group([config for config, _ in members], rows, dim=dim, pooling=pooling, **options)
        groups.append(group)
        place |= {name: (group, position) for position, (_, name) in enumerate(members)}
    return groups, place


def _features_of(
    slots: KeyedJaggedTensor, keys: list[str], edges: list[int], lengths_FB: Tensor, num_bags: int, wanted: list[str]
) -> tuple[Tensor, Tensor]:
    """Values and lengths of some features, in the order wanted; no copy where the batch has just these."""
    if keys == wanted:
        return slots.values(), lengths_FB
    positions = [keys.index(name) for name in wanted]
    values = torch.cat([slots.values()[edges[p] : edges[p + 1]] for p in positions])
    return values, torch.cat([lengths_FB[p * num_bags : (p + 1) * num_bags] for p in positions])
