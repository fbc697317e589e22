"""Where every embedding row lives, decided from a profile, a topology and a memory budget."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts import AccessProfile, InputError, ShardPlan, local_folder, write_folder
from recmill.data.schema import Schema
from recmill.planning.dedup import choose_features, dedup_json
from recmill.planning.explain import explain_plan
from recmill.planning.ingest import starting_workers
from recmill.planning.sharing.choice import SharedChoice, choose_sharing
from recmill.planning.sharing.tables import Sharing
from recmill.planning.tiers.entries import prediction_json, shard_entry, single_rank_entries, table_entries
from recmill.planning.tiers.explain import explain_tables
from recmill.planning.tiers.problem import TierProblem, table_memory
from recmill.planning.tiers.reads import TableReads, load_reads
from recmill.planning.tiers.refresh import (
    DEFAULT_STEPS,
    Moves,
    Origin,
    choose_rows,
    count_moves,
    cut_by_origin,
    load_previous,
    settle,
)
from recmill.planning.tiers.row_files import write_rows
from recmill.planning.tiers.solution import Solved, solve_tiers
from recmill.planning.topology import Topology
from recmill.planning.torchrec_plan import table_bytes, torchrec_body
from recmill.progress import Progress, no_progress

__all__ = ["ShardPlan", "Topology", "default_plan", "plan_shards", "table_bytes"]

STRATEGIES = ("tiers", "torchrec")

TierRows = dict[str, dict[str, np.ndarray]]  # table -> rows of its replicated and node tiers, by slot


def plan_shards(
    profile: AccessProfile | str | Path,
    *,
    out: str | Path,
    topology: Topology,
    memory_budget_bytes: int,
    hot_budget_bytes: int | None = None,
    compress: str | float | None = None,
    precision: str = "float32",
    batch_size: int = 2048,
    previous: ShardPlan | str | Path | None = None,
    previous_steps: int = DEFAULT_STEPS,
    strategy: str = "tiers",
    total_bytes_ratio: float | None = 1.0,
    cores: int | None = None,
    progress: Progress = no_progress,
) -> ShardPlan:
    """Place every row of every table of a profile and write a ShardPlan.

    `memory_budget_bytes` is what one rank may spend on rows, their optimiser state and finding them; `batch_size` is
    global. `strategy` "tiers" minimises the predicted seconds of a step's communication by replicating hot rows,
    keeping warm ones once a node and spreading cold ones, while all ranks together send at most `total_bytes_ratio`
    times the bytes of the plan with every row global (None: any number); "torchrec" asks TorchRec's planner.
    `previous` is an older plan: rows move only if that pays within `previous_steps` steps. `hot_budget_bytes` adds a
    hot set for hot batches, `compress` shared parameters for tables, each from a budget of its own; `precision` is that
    of shared parameters, float32 or int8. `cores` are those
    that a rank has for ingestion (None: this machine's, shared by the ranks of a node). The plan also says which
    features to deduplicate, in what layout to store the data, and with how many workers to start reading it.
    """
    request = _Request(
        profile=profile if isinstance(profile, AccessProfile) else AccessProfile.load(profile),
        topology=topology,
        memory_budget_bytes=memory_budget_bytes,
        batch_size=batch_size,
        strategy=strategy,
        total_bytes_ratio=total_bytes_ratio,
        previous_steps=previous_steps,
    )
    request.check()
    older = previous if previous is None or isinstance(previous, ShardPlan) else ShardPlan.load(previous)
    if older is not None and strategy != "tiers":
        raise InputError(f"strategy {strategy!r} knows no rows to keep; --from goes with strategy 'tiers'")
    schema = Schema.load(request.profile.path)
    progress("plan tables", 0, len(schema.tables))
    sharing = _choose_sharing(request, schema, compress, precision)
    body, rows = _place(sharing.left_for_others(request), sharing.others(schema), older)
    sharing.add_to(body, schema, request)
    progress("plan tables", len(schema.tables), len(schema.tables))
    body |= {
        "topology": topology.to_json(),
        "memory_budget_bytes": memory_budget_bytes,
        "batch_size": batch_size,
        "strategy": strategy,
        "hot_set": None,
        "shared": sharing.choice.shared,
        "dedup": dedup_json(choose_features(request.profile, schema, batch_size=batch_size), request.profile, schema),
        "ingest": starting_workers(cores or max(1, (os.cpu_count() or 1) // topology.ranks_per_node)),
        "profile_hash": request.profile.content_hash,
    }
    inputs = {"profile": request.profile.content_hash} | ({"previous": older.content_hash} if older else {})
    with write_folder(out, manifest_name=ShardPlan.manifest_name) as folder:
        if hot_budget_bytes is not None:
            tiers = body.get("prediction")  # of cold batches
            cold_bytes_s = tiers["seconds"] - tiers["latency_seconds"] if tiers else None
            body["hot_set"] = _add_hot_set(request, schema, hot_budget_bytes, sharing.choice, cold_bytes_s, folder)
        if sharing.choice.shared:
            sharing.choice.write_rows(folder)
        _write_all_rows(folder, schema, body["tables"], rows, progress)
        body["why"] = explain_plan(body)
        ShardPlan(body=body, inputs=inputs).seal(folder)
    return ShardPlan.load(out)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What was asked for."""

    profile: AccessProfile
    topology: Topology
    memory_budget_bytes: int
    batch_size: int
    strategy: str
    total_bytes_ratio: float | None
    previous_steps: int

    def check(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"strategy is {self.strategy!r}, expected one of {', '.join(STRATEGIES)}")
        for name in ("memory_budget_bytes", "batch_size", "previous_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number of 1 or more")
        ratio = self.total_bytes_ratio
        if ratio is not None and not 1 <= ratio < float("inf"):
            raise InputError(f"total_bytes_ratio is {ratio!r}, expected a number of 1 or more, or None for no limit")
        if not self.profile.tables:
            raise InputError(f"{self.profile.path}: the profile has no tables, so there is nothing to place")


def _place(request: _Request, schema: Schema | None, older: ShardPlan | None) -> tuple[dict[str, Any], TierRows]:
    """What plan.json says about tables that keep parameters of their own, and the rows of their tiers."""
    if schema is None:
        nothing = {"tables": {}, "rank_bytes": [0] * request.topology.world_size}
        return nothing | {"solver": "highs", "objective": 0.0, "bound": 0.0, "gap": 0.0}, {}
    if request.strategy == "torchrec":
        budget, batch_size = request.memory_budget_bytes, request.batch_size
        return torchrec_body(request.profile, schema, request.topology, budget, batch_size), {}
    return _plan_tiers(request, schema, older)


def _plan_tiers(request: _Request, schema: Schema, older: ShardPlan | None) -> tuple[dict[str, Any], TierRows]:
    topology, budget = request.topology, request.memory_budget_bytes
    tables = load_reads(request.profile, schema, batch_size=request.batch_size, world_size=topology.world_size)
    problem = TierProblem(
        tables=tables,
        topology=topology,
        memory_budget_bytes=budget,
        total_bytes_ratio=request.total_bytes_ratio,
    )
    problem.check_feasible()
    if topology.world_size == 1:
        return _single_rank_body(tables, topology), {}
    scratch_origins = [Origin(table=t, kind="global", rows=None) for t in range(len(tables))]
    with local_folder(request.profile.path) as folder:
        if older is None:
            solved, origins = solve_tiers(problem), scratch_origins
            rows = _rows_of(tables, origins, solved, folder)
            refresh = None
        else:
            load_previous(older, tables, topology)
            steps = request.previous_steps
            segments, origins = cut_by_origin(older, tables, folder, topology, steps=steps)
            scratch = solve_tiers(problem)
            scratch_rows = _rows_of(tables, scratch_origins, scratch, folder)
            problem = replace(problem, segments=tuple(segments))
            solved = solve_tiers(problem)
            rows = _rows_of(tables, origins, solved, folder)
            rows = {name: settle(tiers, older, name) for name, tiers in rows.items()}
            refresh = {
                "previous_hash": older.content_hash,
                "steps": steps,
                **_compare(problem, solved, count_moves(rows, _whole(problem, solved), older, tables, topology)),
                "from_scratch": _compare(
                    problem, scratch, count_moves(scratch_rows, _whole(problem, scratch), older, tables, topology)
                ),
            }
    entries = table_entries(problem, solved)
    for name, why in explain_tables(problem, solved).items():
        entries[name]["why"] = why
    body: dict[str, Any] = {
        "tables": entries,
        "rank_bytes": [int(np.ceil(held)) for held in solved.prediction.rank_memory],
        "solver": "highs",
        "objective": solved.prediction.objective,
        "bound": solved.bound,
        "gap": solved.gap,
        "total_bytes_ratio": request.total_bytes_ratio,
        "prediction": prediction_json(problem, solved),
        "refresh": refresh,
    }
    return body, rows


def _rows_of(tables: list[TableReads], origins: list[Origin], solved: Solved, folder: Path) -> TierRows:
    return {
        table.name: choose_rows(t, tables, origins, solved.placement.rows, folder) for t, table in enumerate(tables)
    }


def _whole(problem: TierProblem, solved: Solved) -> dict[str, int]:
    return {problem.tables[t].name: rank for t, rank in solved.placement.whole.items()}


def _compare(problem: TierProblem, solved: Solved, moves: Moves) -> dict[str, Any]:
    return {"moved_rows": moves.rows, "moved_bytes": moves.bytes, "seconds": solved.prediction.seconds}


def _single_rank_body(tables: list[TableReads], topology: Topology) -> dict[str, Any]:
    entries = single_rank_entries(tables, topology)
    for entry in entries.values():
        entry["why"] = "one rank: nothing travels, so every table is kept whole"
    return {
        "tables": entries,
        "rank_bytes": [sum(map(table_memory, tables))],
        "solver": "highs",
        "objective": 0.0,
        "bound": 0.0,
        "gap": 0.0,
        "prediction": None,
        "refresh": None,
    }


def _choose_sharing(request: _Request, schema: Schema, compress: str | float | None, precision: str) -> Sharing:
    if compress is None:
        if precision != "float32":
            raise InputError(f"precision is {precision!r}, which is that of shared parameters: it goes with compress")
        return Sharing(choice=SharedChoice(shared=None))
    # Tables that fit the ranks together need no sharing; a shared array is held by every rank.
    full = sum(table_bytes(table) for table in schema.tables)
    fits = full <= request.memory_budget_bytes * request.topology.world_size
    limit = None if fits else request.memory_budget_bytes
    how: dict[str, Any] = {"compress": compress, "memory_budget_bytes": limit, "precision": precision}
    return Sharing(choice=choose_sharing(request.profile, **how))


def _add_hot_set(
    request: _Request,
    schema: Schema,
    budget_bytes: int,
    choice: SharedChoice,
    cold_bytes_s: float | None,
    folder: Path,
) -> dict[str, Any] | None:
    """The hot rows of tables that are not on every rank anyway; None where all of them share parameters."""
    from recmill.planning.hot.selection import choose_hot_set

    shared = frozenset(choice.shared["tables"] if choice.shared else ())
    if shared.issuperset(table.name for table in schema.tables):
        return None
    hot = choose_hot_set(
        request.profile,
        budget_bytes=budget_bytes,
        topology=request.topology,
        batch_size=request.batch_size,
        ignored=shared,
        cold_bytes_s=cold_bytes_s,
    )
    hot.write(folder)
    return hot.to_json()


def _write_all_rows(
    folder: Path, schema: Schema, entries: Mapping[str, Any], rows: TierRows, progress: Progress
) -> None:
    (folder / "rows").mkdir()
    for done, table in enumerate(schema.tables):
        moved = rows.get(table.name, {})
        kinds = [tier["kind"] for tier in entries[table.name]["tiers"]]
        listed = [moved[kind] if kind in ("replicated", "node") else None for kind in kinds]
        write_rows(folder / "rows" / f"{table.name}.parquet", table.num_rows, listed)
        progress("write rows of tables", done + 1, len(schema.tables))


def default_plan(schema: Schema, topology: Topology) -> ShardPlan:
    """Whole tables on single ranks, the largest first to the emptiest rank: what runs when no plan is given."""
    load = [0] * topology.world_size
    tables: dict[str, Any] = {}
    for table in sorted(schema.tables, key=lambda table: (-table.num_rows * table.dim, table.name)):
        rank = load.index(min(load))
        load[rank] += table_bytes(table)
        tables[table.name] = {
            "collection": "sequence" if table.name in schema.sequence_tables else "pooled",
            "placement": "torchrec",
            "sharding": "table_wise",
            "shards": [shard_entry(rank, 0, table.num_rows, table.dim, topology)],
        }
    body = {"topology": topology.to_json(), "tables": tables, "solver": "largest first", "objective": None}
    return ShardPlan(path="", body=body)
