"""A model sharded over ranks by TorchRec: tables by the plan, everything else replicated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recmill.artifacts import ShardPlan, module_name
from recmill.artifacts.plan import SharedParameters
from recmill.data.schema import Schema
from recmill.data.tables import distinct_tables, logical_names
from recmill.model.dense_optimiser import DenseOptimiser
from recmill.model.embeddings import TableEmbeddings, initial_rows
from recmill.model.ranking_model import RankingModel
from recmill.model.stores.disk.store import DiskStore
from recmill.model.stores.hot.collection import HotEmbeddingCollection
from recmill.model.stores.hot.sync import HotExchange
from recmill.model.stores.interface import InitialRows, TableOptimiser, TableStore
from recmill.model.stores.shared.tables import attach_shared_tables
from recmill.model.stores.tiered.collection import TieredEmbeddingCollection
from recmill.model.stores.tiered.tier_map import TierMap
from recmill.model.stores.torchrec import TorchRecStore
from recmill.model.stores.uvm_caching import cache_tables
from recmill.training.config import TrainConfig
from recmill.training.rank.dedup import DedupChoice
from recmill.training.rank.holders import TableHolders, assign_tables, exact_rows_of
from recmill.training.switches import looks_ahead


class _NoWrapper(DataParallelWrapper):  # type: ignore[misc]
    """In place of DistributedDataParallel: DenseOptimiser sums the dense gradients."""

    def wrap(self, dmp: DistributedModelParallel, env: Any, device: torch.device) -> None:
        dmp._dmp_wrapped_module = dmp._dmp_wrapped_module.to(device)


@dataclass(kw_only=True)
class ShardedModel:
    """The model as one rank holds it, with its optimisers; tables update themselves in the backward pass.

    `stores` hold the tables between them. While `is_hot`, the live values of hot rows are those of `hot`.
    """

    module: DistributedModelParallel
    dense_optimiser: DenseOptimiser
    schema: Schema
    stores: tuple[TableStore, ...] = ()
    hot: tuple[HotEmbeddingCollection, ...] = ()
    sharing: SharedParameters | None = None  # how tables share parameters: part of what the model is
    is_hot: bool = False
    groups: Sequence[dist.ProcessGroup] = ()  # of the collections beside TorchRec's
    # With tables on disk or lookahead: announces the ids of a coming batch.
    prefetch: Callable[[Any], None] | None = None

    def enter_hot(self) -> None:
        """Copy the hot rows to every rank: from here on hot batches are trained."""
        if not self.is_hot:
            for collection in self.hot:
                collection.enter(self.stores)
            self.is_hot = True

    def leave_hot(self) -> None:
        """Write the hot rows back to their tables: from here on any batch can be trained."""
        self.write_hot_back()
        self.is_hot = False

    def write_hot_back(self) -> None:
        """Update the stores with the hot rows (for evaluation and checkpoints), staying in hot mode."""
        if self.is_hot:
            for collection in self.hot:
                collection.leave(self.stores)

    def schedule_lr(self, config: TrainConfig, *, step: int, num_steps: int) -> None:
        """Set the learning rates of the next step by the config's schedule, after `step` steps."""
        if config.lr_schedule == "constant":
            return
        share = 1 - step / num_steps
        for group in self.dense_optimiser.param_groups:
            group["lr"] = share * config.dense_lr
        for store in self.stores:
            store.set_lr(share * config.table_lr)
        for collection in self.hot:
            collection.set_lr(share * config.table_lr)

    def table_states(self) -> list[dict[str, Any]]:
        """The tables as a checkpoint stores them, one state per store."""
        self.write_hot_back()
        return [store.state() for store in self.stores]

    def absorb_tables(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over states of the form of `table_states`, after a checkpoint has been read into them."""
        for store, state in zip(self.stores, states, strict=True):
            store.absorb(state)

    def close(self) -> None:
        """End the collections' process groups, which keep threads and connections; all ranks call it together."""
        dist.barrier()  # nobody waits for a message any more
        for group in self.groups:
            dist.destroy_process_group(group)

    def dense_state(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.module.state_dict().items() if name.startswith("ranker.")}


def shard_model(
    schema: Schema,
    config: TrainConfig,
    plan: ShardPlan,
    device: torch.device,
    *,
    dedup: DedupChoice | None = None,
    disk_folder: Path | None = None,
) -> ShardedModel:
    """Build the model, place its tables by the plan, and start all weights as this seed starts them anywhere.

    `dedup` says which features' batches hold distinct rows only (None: none of them); `disk_folder` is where tables
    beyond `table_memory_bytes` are kept.
    """
    dedup = dedup or DedupChoice()
    torch.manual_seed(config.seed)
    held = assign_tables(schema, plan, config, device=device.type)
    model = RankingModel(
        schema, config, deduplicated=dedup.features, elsewhere=held.elsewhere, repeated_ids=frozenset(dedup.ids)
    )
    _fuse_table_optimiser(model.embeddings, config)
    for table_config in (own for configs in model.embeddings.configs.values() for own in configs):
        table_config.init_fn = _leave_as_it_is
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    kept = {name: table for name, table in plan.tables.items() if name not in held.elsewhere}
    torchrec_plan = replace(plan, tables=kept)
    sharding_plan = torchrec_plan.to_torchrec(device.type, distinct=distinct_tables(schema, dedup.features))
    for table, share in held.cached.items():
        cache_tables(sharding_plan, [table], load_factor=share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DistributedModelParallel(
            model,
            device=device,
            plan=sharding_plan,
            sharders=sharders,
            data_parallel_wrapper=_NoWrapper(),
        )
    dense = [parameter for name, parameter in module.named_parameters() if name.startswith("ranker.")]
    optimiser = DenseOptimiser(dense, lr=config.dense_lr, weight_decay=config.dense_weight_decay)
    tables = _Tables(config=config, plan=plan, device=device, held=held)
    stores = [
        *([_torchrec_store(module, schema, config)] if kept else []),
        *tables.attach_tiered(model.embeddings),
        *tables.attach_shared(model.embeddings),
        *(disk := tables.attach_disk(model.embeddings, disk_folder)),
    ]
    for store in stores:
        store.start(_initial_rows(schema, config))
    hot = tuple(tables.attach_hot(model.embeddings))
    optimiser.meanwhile += [collection.exchange.settle for collection in hot[:1]]  # they share it
    return ShardedModel(
        module=module,
        dense_optimiser=optimiser,
        schema=schema,
        stores=tuple(stores),
        hot=hot,
        sharing=plan.shared if held.shared else None,
        groups=tables.groups,
        prefetch=model.embeddings.prefetch if disk or looks_ahead(config) else None,
    )


def _torchrec_store(module: DistributedModelParallel, schema: Schema, config: TrainConfig) -> TorchRecStore:
    names = logical_names(schema)

    def table_of(path: str) -> str:
        # embeddings.pooled.embedding_bags.<module name>.weight
        return names[path.split(".")[-2]]

    weights = {table_of(path): value for path, value in module.state_dict().items() if path.startswith("embeddings.")}
    state = {
        table_of(path): {key.split(".")[-1]: value for key, value in entry.items()}
        for path, entry in module.fused_optimizer.state_dict()["state"].items()
    }
    names_of_state = table_optimiser(config).state_names
    return TorchRecStore(weights, state, state_names=names_of_state, optimiser=module.fused_optimizer)


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """Builds the collections that hold tables beside TorchRec's, and connects the model's lookups to them."""

    config: TrainConfig
    plan: ShardPlan
    device: torch.device
    held: TableHolders
    groups: list[dist.ProcessGroup] = field(default_factory=list)  # made for the collections

    def _by_shape(self, embeddings: TableEmbeddings, tables: frozenset[str]) -> Iterator[tuple[str, list[Any]]]:
        wanted = {module_name(table) for table in tables}
        for shape, configs in embeddings.configs.items():
            if chosen := [config for config in configs if config.name in wanted]:
                yield shape, chosen

    def _options(self) -> dict[str, Any]:
        # A group of its own separates a collection's messages from those of other threads.
        self.groups.append(dist.new_group())
        return {
            "optimiser": table_optimiser(self.config),
            "process_group": self.groups[-1],
            "device": self.device,
        }

    def attach_tiered(self, embeddings: TableEmbeddings) -> list[TableStore]:
        built: list[TableStore] = []
        for shape, configs in self._by_shape(embeddings, self.held.tiered):
            is_ahead = looks_ahead(self.config)
            collection = TieredEmbeddingCollection(
                configs,
                self._striped(configs) if is_ahead else self.plan,
                is_pooled=shape != "sequence",
                sync_every=self.config.hot_sync_every,
                ranks_per_node=self.plan.topology.ranks_per_node,
                lookahead=self.config.lookahead_batches if is_ahead else 0,
                merges_nodes=None if self.config.merge_requests == "auto" else self.config.merge_requests == "true",
                wire=None if self.config.wire == "auto" else self.config.wire,
                **self._options(),
            )
            self.groups.extend(collection.grid.own_groups)
            embeddings.attach(shape, collection.tables, collection)
            built.append(collection)
        return built

    def _striped(self, configs: Sequence[Any]) -> dict[str, TierMap]:
        names = {module_name(table): table for table in self.held.tiered}
        return {names[config.name]: TierMap.of(config.num_embeddings) for config in configs}

    def attach_shared(self, embeddings: TableEmbeddings) -> list[TableStore]:
        """One array for all shared tables; the collection of the first shape represents it."""
        if not self.held.shared or self.plan.shared is None:
            return []
        exact = exact_rows_of(self.plan)
        built = attach_shared_tables(embeddings, self.plan.shared, exact, **self._options())
        for shape, collection in built:
            # Their rows are on every rank anyway: hot batches read them by their own ids.
            embeddings.attach(shape, collection.tables, collection, is_hot=True)
        return [built[0][1]]

    def attach_disk(self, embeddings: TableEmbeddings, folder: Path | None) -> list[DiskStore]:
        built = []
        for shape, configs in self._by_shape(embeddings, frozenset(self.held.on_disk)):
            assert folder is not None  # a memory limit comes with a folder
            store = DiskStore(
                configs,
                folder=folder,
                optimiser=table_optimiser(self.config),
                hot_rows=self.held.on_disk,
                seed=self.config.seed,
            )
            embeddings.attach(shape, store.tables, store)
            built.append(store)
        return built

    def attach_hot(self, embeddings: TableEmbeddings) -> list[HotEmbeddingCollection]:
        built: list[HotEmbeddingCollection] = []
        options: dict[str, Any] = {}
        for shape, configs in self._by_shape(embeddings, frozenset(self.held.hot_rows)):
            if not options:  # one exchange for all of them
                options = {"sync": self.config.hot_sync, **self._options()}
                options["exchange"] = HotExchange(options.pop("process_group"))
            collection = HotEmbeddingCollection(configs, self.held.hot_rows, **options)
            embeddings.attach(shape, collection.tables, collection, is_hot=True)
            built.append(collection)
        return built


def table_optimiser(config: TrainConfig) -> TableOptimiser:
    return TableOptimiser(kind=config.table_optimiser, lr=config.table_lr)


def _initial_rows(schema: Schema, config: TrainConfig) -> InitialRows:
    tables = {table.name: table for table in schema.tables}

    def rows(name: str, start: int, stop: int) -> Tensor:
        table = tables[name]
        scale = config.table_init_scale or max(0.01, 1 / math.sqrt(table.num_rows))
        return initial_rows(name, start=start, stop=stop, dim=table.dim, scale=scale, seed=config.seed)

    return rows


def _leave_as_it_is(weight: Tensor) -> Tensor:
    """Replaces TorchRec's initialisation, which takes as long as ours and is overwritten by it."""
    return weight


def _fuse_table_optimiser(embeddings: nn.Module, config: TrainConfig) -> None:
    optimisers: dict[str, tuple[Any, dict[str, float]]] = {
        "rowwise_adagrad": (RowWiseAdagrad, {"lr": config.table_lr, "eps": 1e-8}),
        "adagrad": (Adagrad, {"lr": config.table_lr, "eps": 1e-8}),
        "sgd": (torch.optim.SGD, {"lr": config.table_lr}),
    }
    kind, arguments = optimisers[config.table_optimiser]
    apply_optimizer_in_backward(kind, embeddings.parameters(), arguments)
