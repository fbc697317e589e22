"""Embedding tables whose rows live where they are read: hot rows on every rank, warm rows on every node.

lookup = collection(ids)            # starts to communicate and returns
...                                 # work that does not need the rows overlaps with it
rows = lookup["history"]            # waits
loss.backward()                     # sends gradients; rows are updated before the next lookup sees them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from kernels import expand_jagged, expand_rows
from recmill.artifacts import InputError, ShardPlan, module_name
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor
from recmill.model.stores.fbgemm import FusedTables
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.lookups import HandOver, pooling_of
from recmill.model.stores.tiered.exchange import Grid
from recmill.model.stores.tiered.layout import KeyLayout
from recmill.model.stores.tiered.lookup import RowExchange
from recmill.model.stores.tiered.routes import Answer, Request
from recmill.model.stores.tiered.state import TieredState
from recmill.model.stores.tiered.tier_map import TierMap
from recmill.model.stores.tiered.window import WindowBatch

# N = ids of a feature, U = distinct rows of a lookup, B = lists of a feature, D = embedding width
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Ids = Any  # KeyedJaggedTensor | InverseKeyedJaggedTensor; TorchRec is untyped, so a union would say no more


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """A feature's lists: ids one after another, their lengths, and which list each sample has (None: its own)."""

    ids_N: Tensor
    lengths_B: Tensor
    inverse: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """A batch that will be looked up: its lists, and by width its request and where each feature's rows are in it."""

    ids: Ids
    lists: dict[str, _Lists]
    requests: dict[int, Request]
    places: dict[int, dict[str, Tensor]]


class TieredEmbeddingCollection(TieredState, nn.Module):
    """Looks up tables by a tier plan on any number of ranks; rows update themselves in the backward pass.

    `plan` is a ShardPlan, or tier maps by table name together with `ranks_per_node`. Call the collection with a
    KeyedJaggedTensor or an InverseKeyedJaggedTensor: pooled tables answer with one vector per sample and feature, the
    others with one JaggedTensor per feature. Forward and gradients are exact for every plan; gradients are divided by
    the number of ranks. `sync_every` above 1 updates replicated rows only every that many steps, with the sum of their
    gradients: less traffic and equal rows on all ranks, but a different training result. `lookahead` above 0 fetches
    the rows of that many announced batches (`prefetch`) together; all rows must be global, and no bit changes.
    `merges_nodes` merges the requests and gradients of a node before they cross to another one (routes.py); `wire` is
    the type of rows and gradients in messages: float32, or bfloat16, which rounds them. Both default to the plan's.

    Tables are not parameters of the module. All ranks construct it, call it and run its backward pass together.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardPlan | Mapping[str, TierMap],
        *,
        is_pooled: bool,
        optimiser: TableOptimiser,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sync_every: int = 1,
        ranks_per_node: int = 1,
        lookahead: int = 0,
        merges_nodes: bool | None = None,
        wire: str | None = None,
    ) -> None:
        super().__init__()
        if sync_every < 1:
            raise InputError(f"sync_every is {sync_every}, expected 1 or more")
        if isinstance(plan, ShardPlan):
            ranks_per_node = plan.topology.ranks_per_node
            merges_nodes = plan.merges_nodes if merges_nodes is None else merges_nodes
            wire = wire or plan.wire
        if wire == "bfloat16" and lookahead:
            raise InputError("wire is bfloat16, but lookahead sends rows with their optimiser state, in float32 only")
        maps = _plan_maps(plan, tables) if isinstance(plan, ShardPlan) else plan
        device = device or torch.device("cpu")
        self.is_pooled = is_pooled
        self.grid = Grid.of(process_group, ranks_per_node=ranks_per_node, device=device, wire=WIRES[wire or "float32"])
        self._configs = dict(zip(maps, tables, strict=True))
        self._features = {name: table for table, config in self._configs.items() for name in config.feature_names}
        for table, config in self._configs.items():
            if config.num_embeddings != maps[table].num_rows:
                raise InputError(
                    f"table {table!r} has {config.num_embeddings} rows, the plan places {maps[table].num_rows}"
                )
        worker = ThreadPoolExecutor(1, thread_name_prefix="tiers")
        self._exchanges: dict[int, RowExchange] = {}
        for dim in sorted({config.embedding_dim for config in tables}):
            own = {table: maps[table].to(device) for table, c in self._configs.items() if c.embedding_dim == dim}
            layout = KeyLayout.of(own, self.grid)
            store = FusedTables([layout.num_local], dim=dim, optimiser=optimiser, device=device)
            self._exchanges[dim] = RowExchange(
                layout,
                store,
                worker,
                sync_every=sync_every,
                is_lookahead=lookahead > 0,
                merges_nodes=bool(merges_nodes),
            )
        self._lookahead = lookahead
        self._ahead: deque[_Coming] = deque()  # batches announced by `prefetch`
        self._opened: dict[int, Future[list[WindowBatch]]] = {}  # the open window, by width
        self._done, self._last = 0, 0  # batches of the open window that were looked up, and all of them
        self._exchange_of = {table: self._exchanges[config.embedding_dim] for table, config in self._configs.items()}
        self._group = process_group
        # Autograd calls backward only where an input requires a gradient; rows are not inputs.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._configs)

    def prefetch(self, ids: Ids) -> None:
        """Announce a coming batch; batches are then looked up in this order, each by the same object."""
        if self._lookahead:
            self._ahead.append(self._coming(ids))

    def forward(self, ids: Ids) -> TieredLookup:
        is_ahead = bool(self._ahead) and self._ahead[0].ids is ids
        coming = self._ahead.popleft() if is_ahead else self._coming(ids)
        if is_ahead and self._done == self._last:
            window = [coming, *islice(self._ahead, self._lookahead - 1)]
            for dim, exchange in self._exchanges.items():
                self._opened[dim] = exchange.open_window([own.requests[dim] for own in window])
            self._done, self._last = 0, len(window)
        parts = []
        for dim, exchange in self._exchanges.items():
            request = coming.requests[dim]
            opened = self._opened.get(dim)
            pending = (
                exchange.lookup_ahead(opened, self._done)
                if is_ahead and opened is not None
                else exchange.lookup(request)
            )
            parts.append(_Part(exchange=exchange, request=request, pending=pending, places=coming.places[dim]))
        self._done += is_ahead
        means = {name for name, table in self._features.items() if pooling_of(self._configs[table]) == "mean"}
        return TieredLookup(parts, coming.lists, self._anchor, is_pooled=self.is_pooled, means=means)

    def _begin_change(self) -> None:
        super()._begin_change()
        self._done = self._last = 0  # the next announced batch opens a window

    def _coming(self, ids: Ids) -> _Coming:
        lists = _lists_of(ids, list(self._features))
        requests, places = {}, {}
        for dim, exchange in self._exchanges.items():
            features = [name for name, table in self._features.items() if self._dim(table) == dim]
            keys = [exchange.layout.keys(self._features[name], lists[name].ids_N) for name in features]
            requests[dim] = exchange.request(torch.cat(keys))
            pieces = torch.split(requests[dim].inverse_N, [len(own) for own in keys])
            places[dim] = dict(zip(features, pieces, strict=True))
        return _Coming(ids=ids, lists=lists, requests=requests, places=places)

    def _dim(self, table: str) -> int:
        return int(self._configs[table].embedding_dim)

    @property
    def exchanges(self) -> tuple[RowExchange, ...]:
        """The exchanges that move rows, one per width of tables."""
        return tuple(self._exchanges.values())

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that begin from now on."""
        for exchange in self._exchanges.values():
            exchange.set_lr(lr)

    def traffic(self) -> dict[str, int]:
        """{"phase/level": bytes this rank has sent}; level is intra (its node) or inter."""
        return {f"{phase}/{level}": count for (phase, level), count in sorted(self.grid.sent.items())}

    @property
    def size_in_bytes(self) -> int:
        """Bytes on this rank: rows, optimiser state, maps and the rows of coming batches."""
        return sum(
            exchange.store.num_bytes
            + sum(tiers.size_in_bytes for tiers in exchange.layout.maps.values())
            + (exchange.window.size_in_bytes if exchange.window else 0)
            for exchange in self._exchanges.values()
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The lookup of one width: the position of each id's row among the distinct ones, per feature."""

    exchange: RowExchange
    request: Request
    pending: Future[Answer]
    places: dict[str, Tensor]

    def rows(self, anchor: Tensor) -> Tensor:
        """[U, D] once they have arrived; their gradient goes to the ranks that hold them."""
        answer = self.pending.result()

        def receive(gradients: Sequence[Tensor]) -> None:
            self.exchange.update(self.request, answer, gradients[0].contiguous())

        rows_UD: Tensor = HandOver.apply(anchor, answer.rows_UD, self.exchange.store.dim, receive)[0]  # type: ignore[no-untyped-call]
        return rows_UD


class TieredLookup(Mapping[str, Any]):
    """The answer to a batch: {feature: [B, D]} or {feature: JaggedTensor}. Waits when it is first read."""

    def __init__(
        self, parts: list[_Part], lists: Mapping[str, _Lists], anchor: Tensor, *, is_pooled: bool, means: set[str]
    ) -> None:
        self._parts, self._lists, self._anchor = parts, lists, anchor
        self._is_pooled, self._means = is_pooled, means
        self._found: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        if self._found is None:
            self._found = {}
            for part in self._parts:
                rows_UD = part.rows(self._anchor)
                for name, places_N in part.places.items():
                    self._found[name] = self._read(name, rows_UD, places_N)
        return self._found

    def _read(self, name: str, rows_UD: Tensor, places_N: Tensor) -> Any:
        own = self._lists[name]
        if self._is_pooled:
            pooled = _pool(rows_UD, places_N, own.lengths_B, is_mean=name in self._means)
            return pooled if own.inverse is None else expand_rows(pooled, own.inverse)
        lengths_B = own.lengths_B
        if own.inverse is not None:
            offsets = _offsets(lengths_B)
            places_N, offsets = expand_jagged(places_N, offsets, own.inverse)
            lengths_B = offsets.diff().to(lengths_B.dtype)
        return JaggedTensor(values=expand_rows(rows_UD, places_N), lengths=lengths_B)

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts for name in part.places)

    def __len__(self) -> int:
        return sum(len(part.places) for part in self._parts)


def _plan_maps(plan: ShardPlan, tables: Sequence[Any]) -> dict[str, TierMap]:
    names = {module_name(table): table for table in plan.tables}
    unplanned = [config.name for config in tables if config.name not in names]
    if unplanned:
        raise InputError(f"{plan.path or 'the plan'}: has no table for {', '.join(unplanned)}")
    return {names[config.name]: TierMap.from_plan(plan, names[config.name]) for config in tables}


def _lists_of(ids: Ids, names: Sequence[str]) -> dict[str, _Lists]:
    if isinstance(ids, InverseKeyedJaggedTensor):
        groups = {ids.group_of(name) for name in names}
        found = {group: _features_of(ids.group_kjt(group)) for group in groups}
        lists = {}
        for name in names:
            group = ids.group_of(name)
            ids_N, lengths_B = found[group][name]
            inverse = None if ids.is_plain(group) else ids.inverse(group)
            lists[name] = _Lists(ids_N=ids_N, lengths_B=lengths_B, inverse=inverse)
        return lists
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"received {type(ids).__name__}, expected a KeyedJaggedTensor or an InverseKeyedJaggedTensor")
    missing = sorted(set(names) - set(ids.keys()))
    if missing:
        raise ValueError(f"the batch lacks the features {', '.join(missing)}; it has {', '.join(ids.keys())}")
    if ids.weights_or_none() is not None:
        raise ValueError("the batch has weights, which a tiered collection does not apply")
    features = _features_of(ids)
    return {name: _Lists(ids_N=features[name][0], lengths_B=features[name][1], inverse=None) for name in names}


def _features_of(ids: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{feature: (values, lengths)}; unlike TorchRec's `to_dict`, also of a batch without samples."""
    if ids.variable_stride_per_key():
        return {name: (lists.values(), lists.lengths()) for name, lists in ids.to_dict().items()}
    lengths_FB = ids.lengths().view(len(ids.keys()), ids.stride())
    values = torch.split(ids.values(), lengths_FB.sum(dim=1).tolist())
    return dict(zip(ids.keys(), zip(values, lengths_FB, strict=True), strict=True))


def _offsets(lengths_B: Tensor) -> Tensor:
    return torch.cat([lengths_B.new_zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])


def _pool(rows_UD: Tensor, places_N: Tensor, lengths_B: Tensor, *, is_mean: bool) -> Tensor:
    """[B, D]: sum or mean of each list's rows; zeros for an empty one, still part of the graph."""
    if not len(places_N):
        return rows_UD.new_zeros(len(lengths_B), rows_UD.shape[1]) + rows_UD.sum()  # the sum of no rows: 0
    mode = "mean" if is_mean else "sum"
    return nn.functional.embedding_bag(places_N, rows_UD, _offsets(lengths_B)[:-1], mode=mode)
