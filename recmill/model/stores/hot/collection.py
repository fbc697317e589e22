"""The most read rows of all tables on every rank, so that batches which read nothing else exchange no rows.

    slot of table t:      0     1     2   ...        hot_rows[t][slot] = the row's id
    rank 0 holds        [w0]  [w1]  [w2]             in its own FBGEMM tables
    rank 1 holds        [w0]  [w1]  [w2]             the same bits

A hot batch contains slots instead of ids (recmill/data/hot/layout.py). Its lookups are local; its gradients are
gathered by all ranks, and applied before the rows are read again (sync.py). Between hot and cold batches, rows move
from and to the stores:

    hot.enter(stores)      # fetch weights and optimiser state of the hot rows
    ... hot batches ...
    hot.leave(stores)      # write them back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from recmill.artifacts import InputError, module_name
from recmill.model.stores.fbgemm import FusedTables
from recmill.model.stores.hot.sync import SYNCS, HotExchange, PendingUpdate
from recmill.model.stores.interface import Replica, TableOptimiser, TableStore, copy_rows
from recmill.model.stores.lookups import HandOver, PooledRows, TableConfig, answer_rows, pick_lists, pooling_of

# F = features, B = samples, N = ids, H = hot rows of a table, D = embedding width


@runtime_checkable
class Refreshes(Protocol):
    """A TableStore that updates copies of its rows in one exchange, sending only what changed."""

    def refresh(self, replicas: Mapping[str, Replica]) -> None: ...


class _HotGroup:
    """The tables of one width and pooling: one FBGEMM module."""

    def __init__(self, configs: Sequence[TableConfig], num_rows: Sequence[int], **options: Any) -> None:
        self.features = [name for config in configs for name in config.feature_names]
        table_of_feature = [table for table, config in enumerate(configs) for _ in config.feature_names]
        self.tables = FusedTables(num_rows, table_of_feature, **options)

    def start(
        self, ids_N: Tensor, lengths_FB: Tensor, *, sync: str, exchange: HotExchange
    ) -> tuple[Tensor, PendingUpdate | None]:
        offsets = ids_N.new_zeros(len(lengths_FB) + 1, dtype=torch.int64)
        torch.cumsum(lengths_FB, 0, out=offsets[1:])
        pending = None
        if torch.is_grad_enabled():
            pending = PendingUpdate(self.tables, ids_N, lengths_FB, offsets, sync=sync, exchange=exchange)
        return self.tables.look_up(ids_N, offsets), pending


class HotEmbeddingCollection(nn.Module):
    """Replicated hot rows of tables that are all pooled (EmbeddingBagConfig) or all looked up by row (EmbeddingConfig).

    `hot_rows` maps a table to the ids of its hot rows in slot order. Call it with a KeyedJaggedTensor of slots; it
    answers like TorchRec's collections: pooled with `.to_dict()`, otherwise a dict feature -> JaggedTensor. It has no
    parameters: the rows update themselves in the backward pass, identically on all ranks.

    `sync`: "raw" equals training one whole table to the last bit; "reduced" sends less where rows repeat in a batch and
    agrees up to float32 rounding (see sync.py).
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
        exchange: HotExchange | None = None,
    ) -> None:
        """Collections that are looked up together can share an `exchange` instead of having a process group each."""
        super().__init__()
        if sync not in SYNCS:
            raise InputError(f"sync is {sync!r}, expected one of {', '.join(SYNCS)}")
        kinds = {isinstance(config, EmbeddingBagConfig) for config in tables}
        if len(kinds) != 1:
            raise InputError("expected tables that are all pooled or all looked up row by row, received both or none")
        self.is_pooled = kinds.pop()
        self.sync, self.exchange = sync, exchange or HotExchange(process_group)
        self.hot_rows = {name: rows.to(torch.int64) for name, rows in _by_config(tables, hot_rows).items()}
        self.features = [name for config in tables for name in config.feature_names]
        shapes: dict[tuple[int, str], list[tuple[TableConfig, str]]] = {}
        for config, name in zip(tables, self.hot_rows, strict=True):
            shapes.setdefault((config.embedding_dim, pooling_of(config)), []).append((config, name))
        options: dict[str, Any] = {"optimiser": optimiser, "device": device or torch.device("cpu")}
        # Plain attributes in a tuple: DDP and checkpoints of the model must not see the rows.
        self._groups: tuple[_HotGroup, ...] = ()
        self._replicas: dict[str, Replica] = {}
        for (dim, pooling), members in shapes.items():
            counts = [len(self.hot_rows[name]) for _, name in members]
            group = _HotGroup([config for config, _ in members], counts, dim=dim, pooling=pooling, **options)
            self._groups = (*self._groups, group)
            for (_, name), weights, state in zip(members, group.tables.weights, group.tables.states, strict=True):
                rows = self.hot_rows[name]
                own = {key: live[: len(rows)] for key, live in state.items()}
                self._replicas[name] = Replica(rows_H=rows, weights_HD=weights[: len(rows)], state=own)
        self._asked: list[PendingUpdate] = []  # of the last lookup
        self.anchor = torch.zeros((), requires_grad=True)  # not a Parameter: it only makes autograd call backward

    def send_sizes(self) -> None:
        """Start the messages about the last lookup, when all collections that share the exchange were looked up."""
        self.exchange.send_sizes()

    def send_ids(self) -> None:
        """Send the ids of the last lookup. Called when the forward pass is over, it need not wait for other ranks."""
        for pending in self._asked:
            pending.send_ids()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that begin from now on."""
        self.exchange.settle()
        for group in self._groups:
            group.tables.set_lr(lr)

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical names of the tables whose hot rows are held here."""
        return tuple(self.hot_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes per rank: rows and optimiser state."""
        return sum(own.num_bytes for own in self._replicas.values())

    def weights(self, table: str) -> Tensor:
        """[H, D] in slot order, a view of the live rows."""
        self.exchange.settle()
        return self._replicas[table].weights_HD

    def optimiser_state(self, table: str) -> Mapping[str, Tensor]:
        """State name -> [H] or [H, D] in slot order, views of the live state."""
        self.exchange.settle()
        return self._replicas[table].state

    def enter(self, stores: Sequence[TableStore]) -> None:
        """Fetch the hot rows and their optimiser state from the stores that hold them. All ranks call it together."""
        for store, replicas in self._held_by(stores):
            if isinstance(store, Refreshes):
                store.refresh(replicas)
            else:
                copy_rows(store, replicas)

    def leave(self, stores: Sequence[TableStore]) -> None:
        """Write the hot rows and their optimiser state back. Every rank has them, so nothing is exchanged."""
        for store, replicas in self._held_by(stores):
            for table, own in replicas.items():
                store.put_rows(table, own.rows_H, own.weights_HD, own.state)

    def _held_by(self, stores: Sequence[TableStore]) -> list[tuple[TableStore, dict[str, Replica]]]:
        """Each store with the replicas of the tables that it holds; their rows are up to date."""
        self.exchange.settle()
        for table in self.hot_rows:
            num_holders = sum(table in store.tables for store in stores)
            if num_holders != 1:
                raise ValueError(f"table {table!r} is held by {num_holders} of the given stores, expected 1")
        found = []
        for store in stores:
            replicas = {table: own for table, own in self._replicas.items() if table in store.tables}
            if replicas := {table: own for table, own in replicas.items() if len(own.rows_H)}:
                found.append((store, replicas))
        return found

    def forward(self, slots: KeyedJaggedTensor) -> Any:
        self.exchange.settle()
        self._asked, started = [], []
        for group in self._groups:
            values, lengths = pick_lists(slots, group.features)
            started.append((lengths, *group.start(values, lengths, sync=self.sync, exchange=self.exchange)))
        found: dict[str, Any] = {}
        for group, (lengths, rows, pending) in zip(self._groups, started, strict=True):
            pieces = torch.split(rows, group.tables.dim, dim=1)
            if pending is not None:
                self._asked.append(pending)
                pieces = HandOver.apply(self.anchor, rows, group.tables.dim, pending.receive)  # type: ignore[no-untyped-call]
            if self.is_pooled:
                found |= zip(group.features, pieces, strict=True)
            else:
                found |= answer_rows(pieces[0], group.features, lengths)
        ordered = {name: found[name] for name in self.features}
        return PooledRows(ordered) if self.is_pooled else ordered


def _by_config(tables: Sequence[TableConfig], hot_rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hot rows by logical table name, in the order of the configs."""
    logical = {module_name(name): name for name in hot_rows} | {name: name for name in hot_rows}
    found: dict[str, Tensor] = {}
    for config in tables:
        if config.name not in logical:
            raise InputError(f"table {config.name!r} has no hot rows; tables with hot rows: {', '.join(hot_rows)}")
        name = logical[config.name]
        rows = hot_rows[name]
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < config.num_embeddings:
            raise InputError(f"table {name!r}: hot rows must be in [0, {config.num_embeddings})")
        found[name] = rows
    return found
