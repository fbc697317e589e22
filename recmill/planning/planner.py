"""A whole plan from a profile, a topology and a memory budget: rows, hot set, shared tables, dedup and ingestion."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from recmill.artifacts import AccessProfile, InputError, ShardPlan, local_folder, write_folder
from recmill.artifacts.plan import HotSet, PlanMoves, Refresh, TablePlan
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema
from recmill.planning.dedup import choose_features, plan_dedup
from recmill.planning.explain import explain_plan, explain_tables
from recmill.planning.ingest import starting_workers
from recmill.planning.sharing.choice import SharedChoice, choose_sharing
from recmill.planning.tiers.costs import VALUE_BYTES, Routing
from recmill.planning.tiers.entries import empty_plan, step_prediction, table_entries, whole_table
from recmill.planning.tiers.problem import TierProblem, table_bytes
from recmill.planning.tiers.reads import TableReads, load_reads
from recmill.planning.tiers.refresh import (
    DEFAULT_STEPS,
    Origin,
    check_previous,
    choose_rows,
    count_moves,
    cut_by_origin,
    settle,
)
from recmill.planning.tiers.routes import MERGE_CHOICES, solve_routes
from recmill.planning.tiers.row_files import write_rows, write_slots
from recmill.planning.tiers.solution import Solved
from recmill.progress import Progress, no_progress

__all__ = ["ShardPlan", "Topology", "default_plan", "plan_shards", "table_bytes"]

STRATEGIES = ("tiers", "torchrec")

TierRows = dict[str, dict[str, np.ndarray]]  # table -> rows of its replicated and node tiers, in slot order


def plan_shards(
    profile: AccessProfile | str | Path,
    *,
    out: str | Path,
    topology: Topology,
    memory_budget_bytes: int,
    hot_budget_bytes: int | Literal["auto"] | None = None,
    compress: str | float | None = None,
    precision: str = "float32",
    batch_size: int = 2048,
    previous: ShardPlan | str | Path | None = None,
    previous_steps: int = DEFAULT_STEPS,
    strategy: str = "tiers",
    total_bytes_ratio: float | None = None,
    merge: str = "auto",
    wire: str = "float32",
    cores: int | None = None,
    progress: Progress = no_progress,
) -> ShardPlan:
    """Place every row of every table of a profile and write a ShardPlan.

    - `memory_budget_bytes`: per-rank budget for rows, optimiser state and lookup indexes
    - `batch_size`: samples of one step over all ranks
    - `strategy`: "tiers" minimises the predicted communication time of a step by replicating hot rows, keeping warm
      rows once per node and spreading cold rows; "torchrec" calls TorchRec's planner
    - `total_bytes_ratio`: all ranks together send at most this many times the bytes of the plan with every row global
      (None: no limit, bytes on fast links may save time on slow ones)
    - `merge`: merge the requests of a node before they cross to another one: "on", "off", or "auto", if that is faster
    - `wire`: type of rows and gradients in messages: float32, or bfloat16, which rounds them
    - `previous`: an older plan; rows move only if the move pays off within `previous_steps` steps
    - `hot_budget_bytes`: per-rank budget for a hot set, on top of `memory_budget_bytes`; "auto": what gains most
      within the memory that rows leave of it; None: no hot set
    - `compress`, `precision`: how far tables share parameters, and the type of the shared ones (float32 or int8)
    - `cores`: a rank's cores for ingestion (None: this machine's, divided by the ranks of a node)
    """
    request = _Request(
        profile=profile if isinstance(profile, AccessProfile) else AccessProfile.load(profile),
        topology=topology,
        memory_budget_bytes=memory_budget_bytes,
        batch_size=batch_size,
        strategy=strategy,
        total_bytes_ratio=total_bytes_ratio,
        merge=merge,
        wire=wire,
        previous_steps=previous_steps,
    )
    request.check()
    older = previous if previous is None or isinstance(previous, ShardPlan) else ShardPlan.load(previous)
    if older is not None and strategy != "tiers":
        raise InputError(f"strategy is {strategy!r}, but --from needs strategy 'tiers'")
    schema = Schema.load(request.profile.path)
    progress("plan tables", 0, len(schema.tables))
    sharing = _choose_sharing(request, schema, compress, precision)
    left = _left_for_others(request, sharing.bytes_per_rank(schema))
    plan, rows = _place(left, _without_tables(schema, sharing.tables), older)
    plan = sharing.added_to(plan, schema)
    progress("plan tables", len(schema.tables), len(schema.tables))
    with write_folder(out, manifest_name=ShardPlan.manifest_name) as folder:
        if hot_budget_bytes is not None:
            plan = replace(plan, hot_set=_add_hot_set(request, schema, hot_budget_bytes, plan, folder))
        if sharing.shared:
            write_slots(folder / "exact", sharing.exact_rows)
        _write_all_rows(folder, schema, plan.tables, rows, progress)
        plan = replace(
            plan,
            memory_budget_bytes=memory_budget_bytes,
            batch_size=batch_size,
            strategy="torchrec" if strategy == "torchrec" else "tiers",
            dedup=plan_dedup(choose_features(request.profile, schema, batch_size=batch_size), request.profile, schema),
            ingest=starting_workers(cores or max(1, (os.cpu_count() or 1) // topology.ranks_per_node)),
            profile_hash=request.profile.content_hash,
            inputs={"profile": request.profile.content_hash} | ({"previous": older.content_hash} if older else {}),
        )
        replace(plan, why=explain_plan(plan)).seal(folder)
    return ShardPlan.load(out)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of `plan_shards` that decide where rows go."""

    profile: AccessProfile
    topology: Topology
    memory_budget_bytes: int
    batch_size: int
    strategy: str
    total_bytes_ratio: float | None
    merge: str
    wire: str
    previous_steps: int

    def check(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"strategy is {self.strategy!r}, expected one of {', '.join(STRATEGIES)}")
        for name, allowed in (("merge", MERGE_CHOICES), ("wire", tuple(VALUE_BYTES))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("memory_budget_bytes", "batch_size", "previous_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number of 1 or more")
        ratio = self.total_bytes_ratio
        if ratio is not None and not 1 <= ratio < float("inf"):
            raise InputError(f"total_bytes_ratio is {ratio!r}, expected a number of 1 or more, or None for no limit")
        if not self.profile.tables:
            raise InputError(f"{self.profile.path}: the profile has no tables, so there is nothing to place")


def _place(request: _Request, schema: Schema | None, older: ShardPlan | None) -> tuple[ShardPlan, TierRows]:
    """A plan of the tables that keep their own parameters (no `schema`: none), and the rows of their tiers."""
    if schema is None:
        return empty_plan(request.topology), {}
    if request.strategy == "torchrec":
        from recmill.planning.torchrec_plan import plan_by_torchrec  # takes seconds to import

        budget, batch_size = request.memory_budget_bytes, request.batch_size
        return plan_by_torchrec(request.profile, schema, request.topology, budget, batch_size), {}
    return _plan_tiers(request, schema, older)


def _plan_tiers(request: _Request, schema: Schema, older: ShardPlan | None) -> tuple[ShardPlan, TierRows]:
    topology = request.topology
    tables = load_reads(request.profile, schema, batch_size=request.batch_size, world_size=topology.world_size)
    problem = TierProblem(
        tables=tables,
        topology=topology,
        memory_budget_bytes=request.memory_budget_bytes,
        total_bytes_ratio=request.total_bytes_ratio,
        routing=Routing(value_bytes=VALUE_BYTES[request.wire]),
    )
    problem.check_feasible()
    if topology.world_size == 1:
        why = "one rank: nothing is sent, so every table is kept whole"
        entries = {table.name: whole_table(table, schema, topology, rank=0, why=why) for table in schema.tables}
        return replace(empty_plan(topology), tables=entries, rank_bytes=(sum(map(table_bytes, schema.tables)),)), {}
    origins = [Origin(table=t, kind="global", rows=None) for t in range(len(tables))]
    refresh = None
    if older is not None:
        check_previous(older, tables, topology)
    with local_folder(request.profile.path) as folder:
        unplaced = problem
        problem, solved = solve_routes(unplaced, merge=request.merge)
        rows = _rows_of(tables, origins, solved, folder)
        if older is not None:
            from_scratch = _moves(problem, solved, rows, older)
            segments, origins = cut_by_origin(older, tables, folder, topology, steps=request.previous_steps)
            problem, solved = solve_routes(replace(unplaced, segments=tuple(segments)), merge=request.merge)
            rows = _rows_of(tables, origins, solved, folder)
            rows = {name: settle(tiers, older, name) for name, tiers in rows.items()}
            refresh = Refresh(
                previous_hash=older.content_hash,
                steps=request.previous_steps,
                **vars(_moves(problem, solved, rows, older)),
                from_scratch=from_scratch,
            )
    reasons = explain_tables(problem, solved)
    plan = replace(
        empty_plan(topology),
        tables={name: replace(entry, why=reasons[name]) for name, entry in table_entries(problem, solved).items()},
        rank_bytes=tuple(int(np.ceil(held)) for held in solved.prediction.rank_memory),
        objective=solved.prediction.objective,
        bound=solved.bound,
        gap=solved.gap,
        total_bytes_ratio=request.total_bytes_ratio,
        merges_nodes=problem.routing.merges_nodes,
        wire="bfloat16" if request.wire == "bfloat16" else "float32",
        prediction=step_prediction(problem, solved),
        refresh=refresh,
    )
    return plan, rows


def _rows_of(tables: list[TableReads], origins: list[Origin], solved: Solved, folder: Path) -> TierRows:
    return {
        table.name: choose_rows(t, tables, origins, solved.placement.rows, folder) for t, table in enumerate(tables)
    }


def _moves(problem: TierProblem, solved: Solved, rows: TierRows, older: ShardPlan) -> PlanMoves:
    whole = {problem.tables[t].name: rank for t, rank in solved.placement.whole.items()}
    moved_rows, moved_bytes = count_moves(rows, whole, older, problem.tables, problem.topology)
    return PlanMoves(moved_rows=moved_rows, moved_bytes=moved_bytes, seconds=solved.prediction.seconds)


def _choose_sharing(request: _Request, schema: Schema, compress: str | float | None, precision: str) -> SharedChoice:
    if compress is None:
        if precision != "float32":
            raise InputError(f"precision is {precision!r}, but it applies to shared parameters only: give compress too")
        return SharedChoice(shared=None)
    # Tables that fit the ranks together need no sharing; a shared array is held by every rank.
    full = sum(table_bytes(table) for table in schema.tables)
    fits = full <= request.memory_budget_bytes * request.topology.world_size
    limit = None if fits else request.memory_budget_bytes
    return choose_sharing(request.profile, compress=compress, memory_budget_bytes=limit, precision=precision)


def _left_for_others(request: _Request, shared_bytes: int) -> _Request:
    """The request with the memory that shared tables leave on every rank."""
    left = request.memory_budget_bytes - shared_bytes
    if left < 1:
        raise InputError(
            f"shared tables take {shared_bytes:,} B on every rank, the budget is {request.memory_budget_bytes:,} B: "
            f"{1 - left:,} B too little; compress more, or give more memory"
        )
    return replace(request, memory_budget_bytes=left)


def _without_tables(schema: Schema, tables: Collection[str]) -> Schema | None:
    """The schema without the features of some tables; None if no table is left."""
    kept = [f for f in schema.features if f.kind == "dense" or f.table not in tables]
    return schema.select(f.name for f in kept) if any(f.kind != "dense" for f in kept) else None


def _add_hot_set(
    request: _Request, schema: Schema, budget: int | Literal["auto"], plan: ShardPlan, folder: Path
) -> HotSet | None:
    """Write the hot rows of tables that are not on every rank anyway; None where no table or memory is left."""
    from recmill.planning.hot.budget import best_choice, candidate_budgets
    from recmill.planning.hot.selection import choose_hot_set

    others = _without_tables(schema, plan.shared.tables if plan.shared else ())
    if others is None:
        return None
    tiers = plan.prediction  # of cold batches
    left = request.memory_budget_bytes - max(plan.rank_bytes, default=0)
    choice = best_choice(
        candidate_budgets(others.tables, left_bytes=left) if budget == "auto" else [budget],
        lambda budget_bytes: choose_hot_set(
            request.profile,
            budget_bytes=budget_bytes,
            schema=others,
            topology=request.topology,
            batch_size=request.batch_size,
            cold_bytes_s=tiers.seconds - tiers.latency_seconds if tiers else None,
        ),
    )
    if choice is None:
        return None
    write_slots(folder / "hot", choice.rows)
    return choice.hot_set


def _write_all_rows(
    folder: Path, schema: Schema, tables: Mapping[str, TablePlan], rows: TierRows, progress: Progress
) -> None:
    (folder / "rows").mkdir()
    for done, table in enumerate(schema.tables):
        moved = rows.get(table.name, {})
        listed = [moved.get(tier.kind) for tier in tables[table.name].tiers]
        write_rows(folder / "rows" / f"{table.name}.parquet", table.num_rows, listed)
        progress("write rows of tables", done + 1, len(schema.tables))


def default_plan(schema: Schema, topology: Topology) -> ShardPlan:
    """Whole tables on single ranks, the largest first to the emptiest rank: what runs when no plan is given."""
    load = [0] * topology.world_size
    tables: dict[str, TablePlan] = {}
    for table in sorted(schema.tables, key=lambda table: (-table.num_rows * table.dim, table.name)):
        rank = load.index(min(load))
        load[rank] += table_bytes(table)
        tables[table.name] = whole_table(table, schema, topology, rank=rank)
    return replace(empty_plan(topology), tables=tables, rank_bytes=tuple(load), solver="largest first", objective=None)
