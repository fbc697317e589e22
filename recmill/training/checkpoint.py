"""Checkpoints of a training run: logical tables, so that any world size and plan can load them.

    run/checkpoints/step-00000500/    the newest two, until the run is finished
    run/checkpoint/                   the finished model

Ranks write their shards into one temporary folder; the first rank seals it and renames it when all are done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.artifacts import Checkpoint, explain_write_errors
from recmill.artifacts.plan import SharedParameters
from recmill.data.schema import Schema
from recmill.data.vocabulary import copy_vocabulary
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection
from recmill.model.stores.shared.tables import attach_shared_tables
from recmill.training.rank.sharding import ShardedModel
from recmill.training.tensors.storage import load_tensors, save_tensors

NUM_KEPT = 2


def save_checkpoint(
    target: Path,
    sharded: ShardedModel,
    *,
    body: Mapping[str, Any],
    inputs: Mapping[str, str],
    vocabulary_of: str | None = None,
) -> None:
    """Write the state of all ranks to `target`, with a dataset's vocabulary; it appears whole or not at all."""
    rank = dist.get_rank()
    folder = target.parent / f".{target.name}.tmp"
    with explain_write_errors(target):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        state = {**_model_state(sharded, sharded.table_states()), "rng": {str(rank): torch.get_rng_state()}}
        save_tensors(state, folder)
        if rank == 0:
            if vocabulary_of:
                copy_vocabulary(vocabulary_of, folder)
            Checkpoint.of_json(body, inputs=inputs).seal(folder)
            if target.exists():
                shutil.rmtree(target)
            os.rename(folder, target)
    dist.barrier()


def load_checkpoint(path: Path, sharded: ShardedModel) -> Checkpoint:
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
    _take_dense_optimiser(sharded, state)
    if has_random_state:
        torch.set_rng_state(state["rng"][rank])
    return checkpoint


def load_dense(path: Path, sharded: ShardedModel) -> None:
    """Load the weights and the optimiser state of the dense half only, on every rank by itself."""
    state = {"dense": sharded.dense_state(), "dense_optimiser": _dense_optimiser_state(sharded.dense_optimiser)}
    load_tensors(state, path, no_dist=True)
    _take_dense_optimiser(sharded, state)


def _take_dense_optimiser(sharded: ShardedModel, state: Mapping[str, Any]) -> None:
    optimiser = sharded.dense_optimiser
    for position, parameter in enumerate(optimiser.param_groups[0]["params"]):
        optimiser.state[parameter] = dict(state["dense_optimiser"][str(position)])


def load_trained_model(
    path: str | Path, *, deduplicated: frozenset[str] = frozenset()
) -> tuple[RankingModel, Checkpoint]:
    """The model of a checkpoint in this one process, unsharded, ready to predict.

    `deduplicated` names the features whose lists its batches hold once each.
    """
    checkpoint = Checkpoint.load(path)
    schema = Schema.from_json(checkpoint.schema, where=f"{path}/checkpoint.json")
    sharing = checkpoint.sharing
    model = RankingModel(
        schema,
        RankerConfig.of(checkpoint.config),
        deduplicated=deduplicated,
        elsewhere=frozenset(sharing.tables) if sharing else frozenset(),
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
    load_tensors(state, Path(path), no_dist=True)
    model.ranker.load_state_dict({name.removeprefix("ranker."): value for name, value in state["dense"].items()})
    return model.eval(), checkpoint


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
        load_tensors({"shared": {"exact_rows": exact}}, Path(path), no_dist=True)
    return attach_shared_tables(model.embeddings, sharing, exact, **options)[0][1]


def newest_checkpoint(folder: Path) -> Path | None:
    """The last complete step checkpoint, if there is one."""
    found = sorted(path for path in folder.glob("step-*") if (path / Checkpoint.manifest_name).exists())
    return found[-1] if found else None


def prune_checkpoints(folder: Path) -> None:
    for path in sorted(folder.glob("step-*"))[:-NUM_KEPT]:
        shutil.rmtree(path)


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


def _dense_optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Adam's moments by position, created where no step has been taken yet, so that there is something to load into."""
    state = {}
    parameters = optimiser.param_groups[0]["params"]
    for position, parameter in enumerate(parameters):
        entry = optimiser.state.get(parameter) or {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        state[str(position)] = dict(entry)
    return state
