"""Checkpoints of a training run: logical tables, so that any world size and plan can load them.

    run/checkpoints/step-00000500/    the newest two, until the run is finished
    run/checkpoint/                   the finished model

Ranks write their shards into one temporary folder; the first rank seals it and renames it when all are done. In an
object store they write into the folder itself, and the manifest, which comes last, makes it a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.artifacts import Checkpoint, explain_write_errors, held_folder, is_remote, join_path, path_exists
from recmill.artifacts.folders import upload_folder
from recmill.artifacts.places.stores import list_names, remove_folder
from recmill.artifacts.plan import SharedParameters
from recmill.data.schema import Schema
from recmill.data.vocabulary import copy_vocabulary
from recmill.model.dense_optimiser import DenseOptimiser
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection
from recmill.model.stores.shared.tables import attach_shared_tables
from recmill.training.rank.sharding import ShardedModel
from recmill.training.tensors.saving import Saver
from recmill.training.tensors.storage import TensorWriter, WrittenFile, load_tensors

NUM_KEPT = 2


def save_checkpoint(
    target: str,
    sharded: ShardedModel,
    *,
    saver: Saver,
    body: Mapping[str, Any],
    inputs: Mapping[str, str],
    before: Callable[[], None] | None = None,
    vocabulary_of: str | None = None,
    is_last: bool = False,
) -> None:
    """Save the state of all ranks to `target`, with a dataset's vocabulary; it appears whole or not at all.

    Rank 0 calls `before` when everything but the manifest is written, and removes older checkpoints afterwards. With
    `is_last` the checkpoint is complete when this returns; otherwise `saver` may still be writing it.
    """
    rank, is_local = dist.get_rank(), not is_remote(target)
    folder = str(Path(target).parent / f".{Path(target).name}.tmp") if is_local else target

    def state() -> dict[str, Any]:
        return {**_model_state(sharded, sharded.table_states()), "rng": {str(rank): torch.get_rng_state()}}

    def finish(writer: TensorWriter, written: Sequence[WrittenFile]) -> None:
        if before is not None:
            before()
        if is_local:
            _complete(Path(folder), writer, written, body, inputs, vocabulary_of)
            remove_folder(target)
            os.rename(folder, target)
            _sync_folder(Path(target).parent)
        else:
            with held_folder(purpose="checkpoint") as scratch:
                _complete(scratch, writer, written, body, inputs, vocabulary_of)
                upload_folder(scratch, target, last=Checkpoint.manifest_name)
        prune_checkpoints(target.rsplit("/", 1)[0])

    saver.wait()
    with explain_write_errors(target):
        if rank == 0:
            remove_folder(folder, first=Checkpoint.manifest_name)
            if is_local:
                Path(folder).mkdir(parents=True)
        dist.barrier()
        saver.save(state, folder, finish=finish, is_last=is_last)


def _complete(
    folder: Path,
    writer: TensorWriter,
    written: Sequence[WrittenFile],
    body: Mapping[str, Any],
    inputs: Mapping[str, str],
    vocabulary_of: str | None,
) -> None:
    """Write what belongs to the tensors: index, vocabulary and manifest."""
    writer.save_index(written, folder)
    if vocabulary_of:
        copy_vocabulary(vocabulary_of, folder)
    Checkpoint.of_json(body, inputs=inputs).seal(folder, known=[own.entry for own in written])
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Wait until the names and small files of a folder are on the disk, as the tensors are."""
    paths = [folder, *(path for path in folder.iterdir() if path.suffix == ".json")]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_checkpoint(path: str | Path, sharded: ShardedModel) -> Checkpoint:
    """Load weights, optimiser state and, at the same world size, random state; returns the checkpoint's manifest."""
    checkpoint = Checkpoint.load(path)
    table_states = sharded.table_states()
    state = _model_state(sharded, table_states)
    rank = str(dist.get_rank())
    has_random_state = checkpoint.world_size == dist.get_world_size()
    if has_random_state:
        state["rng"] = {rank: torch.get_rng_state()}
    # Tensors are filled in place: most are views of the live model, the others are taken over afterwards.
    load_tensors(state, path)
    sharded.absorb_tables(table_states)
    if has_random_state:
        torch.set_rng_state(state["rng"][rank])
    return checkpoint


def load_dense(path: str | Path, sharded: ShardedModel) -> None:
    """Load the weights and the optimiser state of the dense half only, on every rank by itself."""
    state = {"dense": sharded.dense_state(), "dense_optimiser": _dense_optimiser_state(sharded.dense_optimiser)}
    load_tensors(state, path, no_dist=True)


def load_trained_model(
    path: str | Path, *, deduplicated: frozenset[str] = frozenset(), has_tables: bool = True
) -> tuple[RankingModel, Checkpoint]:
    """The model of a checkpoint in this one process, unsharded, ready to predict.

    `deduplicated` names the features whose lists its batches hold once each. With `has_tables=False` the model has no
    tables but those that share parameters: `CheckpointTables` reads the others one by one.
    """
    checkpoint = Checkpoint.load(path)
    schema = Schema.from_json(checkpoint.schema, where=f"{path}/checkpoint.json")
    sharing = checkpoint.sharing
    elsewhere = frozenset(sharing.tables) if sharing else frozenset()
    model = RankingModel(
        schema,
        RankerConfig.of(checkpoint.config, where=str(checkpoint.path)),
        deduplicated=deduplicated,
        elsewhere=elsewhere if has_tables else frozenset(table.name for table in schema.tables),
        table_device=torch.device("cpu"),
    )
    state: dict[str, Any] = {
        "tables": model.embeddings.table_weights(),
        "dense": {f"ranker.{k}": v for k, v in model.ranker.state_dict().items()},
    }
    if sharing:
        array = attach_saved_sharing(path, model, sharing).array
        state["shared"] = {"array": array.weight.data}
        if array.exponents is not None:
            state["shared"]["exponents"] = array.exponents
    load_tensors(state, path, no_dist=True)
    model.ranker.load_state_dict({name.removeprefix("ranker."): value for name, value in state["dense"].items()})
    return model.eval(), checkpoint


class CheckpointTables(Mapping[str, torch.Tensor]):
    """The tables of a checkpoint by name, without those that share parameters. Each is read anew; nothing is kept."""

    def __init__(self, path: str | Path, checkpoint: Checkpoint) -> None:
        schema = Schema.from_json(checkpoint.schema, where=f"{path}/checkpoint.json")
        shared = checkpoint.sharing.tables if checkpoint.sharing else {}
        self._path = path
        self._shapes = {own.name: (own.num_rows, own.dim) for own in schema.tables if own.name not in shared}

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = torch.empty(self._shapes[name])
        load_tensors({"tables": {name: weight}}, self._path, no_dist=True)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def attach_saved_sharing(
    path: str | Path, model: RankingModel, sharing: SharedParameters, **options: Any
) -> SharedEmbeddingBagCollection:
    """Attach a shared array laid out like the checkpoint's; which rows it keeps exactly is read first."""
    exact = {
        name: torch.zeros(entry.exact_rows, dtype=torch.int64)
        for name, entry in sharing.tables.items()
        if entry.kind == "both"
    }
    if exact:
        load_tensors({"shared": {"exact_rows": exact}}, path, no_dist=True)
    return attach_shared_tables(model.embeddings, sharing, exact, **options)[0][1]


def newest_checkpoint(folder: str | Path) -> str | None:
    """The last complete step checkpoint, if there is one."""
    found = _complete_checkpoints(folder)
    return join_path(folder, found[-1]) if found else None


def prune_checkpoints(folder: str) -> None:
    """Remove all but the newest complete step checkpoints, and what is left of saves that were interrupted."""
    kept = _complete_checkpoints(folder)[-NUM_KEPT:]
    for name in list_names(folder):
        is_unfinished = name.startswith(".step-") and name.endswith(".tmp")
        if (name.startswith("step-") and name not in kept) or is_unfinished:
            remove_folder(join_path(folder, name), first=Checkpoint.manifest_name)


def _complete_checkpoints(folder: str | Path) -> list[str]:
    names = [name for name in list_names(folder) if name.startswith("step-")]
    return [name for name in names if path_exists(join_path(join_path(folder, name), Checkpoint.manifest_name))]


def _model_state(sharded: ShardedModel, table_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all stores together, with that of the dense half.

    An optimiser without state has no entry: an empty one would be a key that another store lacks.
    """
    merged: dict[str, Any] = {"tables": {}}
    for state in table_states:
        for part, entries in state.items():
            kept = {name: entry for name, entry in entries.items() if not isinstance(entry, Mapping) or entry}
            if kept:
                merged.setdefault(part, {}).update(kept)
    return {
        **merged,
        "dense": sharded.dense_state(),
        "dense_optimiser": _dense_optimiser_state(sharded.dense_optimiser),
    }


def _dense_optimiser_state(optimiser: DenseOptimiser) -> dict[str, Any]:
    """Adam's moments by position: views of the live ones."""
    return {str(position): dict(optimiser.state[own]) for position, own in enumerate(optimiser.parameters)}
