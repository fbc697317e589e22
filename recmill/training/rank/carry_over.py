"""A model that was trained before goes on with data whose tables may have grown: `recmill train --from CHECKPOINT`.

Tables are read from the checkpoint block by block and written into the stores by row id, so neither the number of ranks
nor the plan has to be the one it was trained with. Rows that the checkpoint lacks keep the values and the empty
optimiser state that every run starts them with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from recmill.artifacts import Checkpoint
from recmill.data.schema import Schema
from recmill.data.vocabulary import reused_rows
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection
from recmill.training.checkpoint import attach_saved_sharing, load_dense
from recmill.training.rank.sharding import ShardedModel
from recmill.training.tensors.storage import load_tensors

BLOCK_ROWS = 1 << 18
SavedBlock = tuple[str, Tensor, Tensor, Mapping[str, Tensor]]  # table, rows, weights, optimiser state


def carry_over(path: str | Path, sharded: ShardedModel, *, data: str | Path) -> None:
    """Set the dense half, its optimiser state and all rows that the checkpoint has; all ranks call it together.

    Rows that the vocabulary of `data` has given to other values since are left as new.
    """
    checkpoint = Checkpoint.load(path)
    rows = _SavedRows(path, checkpoint, reused=reused_rows(data, _schema_of(checkpoint), sharded.schema))
    for store in sharded.stores:
        if isinstance(store, SharedEmbeddingBagCollection):
            store.merge_rows(block for table in store.array.tables for block in rows.blocks(table))
            continue
        for table in store.tables:
            for block in rows.blocks(table):
                store.put_rows(*block)
    load_dense(path, sharded)


def _schema_of(checkpoint: Checkpoint) -> Schema:
    return Schema.from_json(checkpoint.schema, where=f"{checkpoint.path}/checkpoint.json")


class _SavedRows:
    """The logical tables of a checkpoint, read a block of rows at a time, whether they shared parameters or not."""

    def __init__(self, path: str | Path, checkpoint: Checkpoint, *, reused: Mapping[str, Any]) -> None:
        self._path, self._reused = path, reused
        schema = _schema_of(checkpoint)
        self._shapes = {table.name: (table.num_rows, table.dim) for table in schema.tables}
        self._optimiser = TableOptimiser(kind=str(checkpoint.config["table_optimiser"]))
        self._shared: SharedEmbeddingBagCollection | None = None
        self._shared_tables: frozenset[str] = frozenset()
        if checkpoint.sharing:
            self._shared_tables = frozenset(checkpoint.sharing.tables)
            model = RankingModel(
                schema,
                RankerConfig.of(checkpoint.config, where=str(checkpoint.path)),
                elsewhere=self._shared_tables,
                table_device=torch.device("meta"),
            )
            self._shared = attach_saved_sharing(path, model, checkpoint.sharing, optimiser=self._optimiser)
            array, momentum = self._shared.array, self._shared.step.momentum
            state = {"array": array.weight.data, "momentum": momentum}
            if array.exponents is not None:
                state["exponents"] = array.exponents
            load_tensors({"shared": state}, path, no_dist=True)

    def blocks(self, table: str) -> Iterator[SavedBlock]:
        num_rows, _ = self._shapes[table]
        for start in range(0, num_rows, BLOCK_ROWS):
            rows = torch.arange(start, min(start + BLOCK_ROWS, num_rows))
            weights, state = self._read(table, rows)
            if table in self._reused:
                kept = ~torch.isin(rows, torch.from_numpy(self._reused[table]))
                rows, weights = rows[kept], weights[kept]
                state = {name: own[kept] for name, own in state.items()}
            yield table, rows, weights, state

    def _read(self, table: str, rows: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self._shared is not None and table in self._shared_tables:
            return self._shared.gather_rows(table, rows)
        num_rows, dim = self._shapes[table]
        start, count = int(rows[0]), len(rows)
        weights = _part(torch.empty(count, dim), start, num_rows)
        wide = (dim,) if self._optimiser.kind == "adagrad" else ()
        state = {name: _part(torch.empty(count, *wide), start, num_rows) for name in self._optimiser.state_names}
        wanted: dict[str, Any] = {"tables": {table: weights}}
        if state:
            wanted["table_optimiser"] = {table: state}
        load_tensors(wanted, self._path, no_dist=True)
        return weights.as_subclass(Tensor), {name: own.as_subclass(Tensor) for name, own in state.items()}


class _PartOfTable(Tensor):
    """Some consecutive rows of a stored tensor, as torch's distributed checkpoints read them (`_Checkpointable`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    start: int
    num_rows: int

    def size(self, *_: Any) -> Any:
        """Of the whole tensor, which the reader compares with the stored one."""
        return torch.Size([self.num_rows, *self.shape[1:]])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rest = self.shape[1:]
        return [ChunkStorageMetadata(offsets=torch.Size([self.start, *(0 for _ in rest)]), sizes=self.shape)]

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        raise NotImplementedError(f"{fqn}: parts of tables are only read")

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)


def _part(rows: Tensor, start: int, num_rows: int) -> _PartOfTable:
    part = rows.as_subclass(_PartOfTable)
    part.start, part.num_rows = start, num_rows
    return part
