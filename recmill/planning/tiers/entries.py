"""A solved tier problem as the plan records it: tiers and costs of every table, and shards that TorchRec accepts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from recmill.artifacts import ShardPlan
from recmill.artifacts.plan import PhasePrediction, Shard, StepPrediction, TablePlan, Tier, TimedTraffic, Traffic
from recmill.artifacts.topology import LEVELS, Topology
from recmill.data.schema import Schema, Table
from recmill.planning.tiers.costs import KINDS, PHASES, held_bytes, phase_latency
from recmill.planning.tiers.problem import TierProblem, table_bytes, whole_rank_bytes
from recmill.planning.tiers.reads import TableReads
from recmill.planning.tiers.solution import Prediction, Solved, TierPlacement, predict, table_rows

# K = kinds of tiers, P = lanes (phase and level)


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """How many rows of a table are in each tier, or the rank that keeps it whole."""

    rows: tuple[int, int, int]  # replicated, node, global
    rank: int | None = None


def placements(problem: TierProblem, solved: Solved) -> dict[str, TablePlacement]:
    """Every table's tiers, segments added up."""
    rows = table_rows(problem, solved.placement)
    return {
        table.name: TablePlacement(
            rows=(int(rows[t, 0]), int(rows[t, 1]), int(table.num_rows - rows[t].sum())),
            rank=solved.placement.whole.get(t),
        )
        for t, table in enumerate(problem.tables)
    }


def table_entries(problem: TierProblem, solved: Solved) -> dict[str, TablePlan]:
    """The plan of every table, without the reasons."""
    held = [0] * problem.topology.world_size
    for t, rank in solved.placement.whole.items():
        held[rank] += table_bytes(problem.tables[t])
    entries = {}
    seconds = binding_seconds(problem, solved.prediction)
    for t, (table, placed) in enumerate(zip(problem.tables, placements(problem, solved).values(), strict=True)):
        sharding, shards = _torchrec_form(table, placed.rank, held, problem)
        entries[table.name] = TablePlan(
            collection="pooled" if table.is_pooled else "sequence",
            placement="torchrec" if placed.rank is not None else "tiered",
            sharding=sharding,
            shards=shards,
            tiers=_tiers(problem, solved, t, placed, seconds),
        )
    return entries


def _tiers(
    problem: TierProblem, solved: Solved, t: int, placed: TablePlacement, seconds_P: np.ndarray
) -> tuple[Tier, ...]:
    table, topology = problem.tables[t], problem.topology
    sent, copies = solved.prediction.table_bytes[t], (topology.world_size, topology.nodes, 1)
    parts: Any = zip(KINDS, placed.rows, copies, sent, sent, strict=True)
    if placed.rank is not None:
        average, owner = problem.whole_bytes
        parts = [("table_wise", table.num_rows, 1, average[t], owner[t])]
    return tuple(
        Tier(
            kind=kind,
            num_rows=num_rows,
            bytes=num_rows * held_bytes(table.dim) * num_copies,
            predicted_bytes_per_step=float(sent_P.sum()) * topology.world_size,
            predicted_bytes_per_rank=float(slowest_P.sum()),
            predicted_inter_node_bytes_per_step=float(sent_P[1 :: len(LEVELS)].sum()) * topology.world_size,
            predicted_seconds_per_step=float(seconds_P @ slowest_P),
        )
        for kind, num_rows, num_copies, sent_P, slowest_P in parts
        if num_rows
    )


def binding_seconds(problem: TierProblem, prediction: Prediction) -> np.ndarray:
    """[P] seconds that a byte adds to the step: 0 on the network level that its phase does not wait for."""
    per_byte = problem.seconds_per_byte
    by_phase = (prediction.lane_bytes * per_byte).reshape(len(PHASES), len(LEVELS))
    binds = by_phase == by_phase.max(axis=1, keepdims=True)
    binds[:, 1] &= ~binds[:, 0]
    found: np.ndarray = per_byte * binds.reshape(-1)
    return found


def step_prediction(problem: TierProblem, solved: Solved) -> StepPrediction:
    """Bytes and seconds per step: by phase, in total, and for the plan with every row global."""
    prediction, topology = solved.prediction, problem.topology
    lanes = prediction.lane_bytes.reshape(len(PHASES), len(LEVELS))
    phases = {
        phase.name: PhasePrediction(
            overlaps_with_compute=phase.is_overlapped,
            intra_node_bytes=float(lanes[p, 0]),
            inter_node_bytes=float(lanes[p, 1]),
            seconds=prediction.phase_seconds[phase.name],
            latency_s=phase_latency(phase, topology),
        )
        for p, phase in enumerate(PHASES)
        if lanes[p].any()
    }
    by_rank = prediction.table_bytes.sum() + whole_rank_bytes(problem, solved.placement.whole).sum(axis=1)
    average, _ = problem.whole_bytes
    sent_P = prediction.table_bytes.sum(axis=(0, 1)) + prediction.count_bytes
    sent_P += average[list(solved.placement.whole)].sum(axis=0)
    every_row_global = predict(problem.direct, TierPlacement(rows=np.zeros((len(problem.segments), 2), np.int64)))
    return StepPrediction(
        seconds=prediction.seconds,
        latency_seconds=prediction.latency_seconds,
        bytes=Traffic(**_sums(sent_P, topology.world_size)),
        bytes_per_rank=tuple(float(value) for value in by_rank),
        phases=phases,
        row_wise_dedup=TimedTraffic(
            seconds=every_row_global.seconds, **_sums(problem.dedup_bytes, topology.world_size)
        ),
    )


def _sums(sent_P: np.ndarray, world_size: int) -> dict[str, float]:
    is_all_to_all = np.repeat([phase.is_all_to_all for phase in PHASES], len(LEVELS))
    sent_P = sent_P * world_size
    return {
        "all_to_all": float(sent_P[is_all_to_all].sum()),
        "gradient_exchange": float(sent_P[~is_all_to_all].sum()),
        "inter_node": float(sent_P[1 :: len(LEVELS)].sum()),
        "total": float(sent_P.sum()),
    }


def _torchrec_form(
    table: TableReads, rank: int | None, held: list[int], problem: TierProblem
) -> tuple[str, tuple[Shard, ...]]:
    """(sharding, shards): whole where the plan or TorchRec requires it, else by rows; `held` grows by its bytes.

    TorchRec splits unpooled tables by rows; pooled tables stay whole unless no rank has the memory.
    """
    need, topology = table_bytes(table), problem.topology
    emptiest = held.index(min(held))
    if rank is None and table.is_pooled and held[emptiest] + need <= problem.memory_budget_bytes:
        rank = emptiest
        held[rank] += need
    if rank is not None:
        return "table_wise", (row_shard(rank, 0, table.num_rows, table.dim, topology),)
    block = -(-table.num_rows // topology.world_size)
    starts = [min(rank * block, table.num_rows) for rank in range(topology.world_size + 1)]
    shards = []
    for rank, (start, stop) in enumerate(pairwise(starts)):
        held[rank] += need // topology.world_size
        shards.append(row_shard(rank, start, stop - start, table.dim, topology))
    return "row_wise", tuple(shards)


def empty_plan(topology: Topology) -> ShardPlan:
    """A plan of no tables, which sends nothing."""
    return ShardPlan(
        topology=topology,
        tables={},
        rank_bytes=(0,) * topology.world_size,
        solver="highs",
        objective=0.0,
        bound=0.0,
        gap=0.0,
        prediction=None,
        refresh=None,
        hot_set=None,
        shared=None,
    )


def row_shard(rank: int, start: int, num_rows: int, dim: int, topology: Topology) -> Shard:
    return Shard(rank=rank, local_rank=rank % topology.ranks_per_node, offset=(start, 0), size=(num_rows, dim))


def whole_table(
    table: Table, schema: Schema, topology: Topology, *, rank: int, placement: Any = "torchrec", why: str | None = None
) -> TablePlan:
    """A table that one rank holds and that sends nothing."""
    tier = Tier(
        kind="table_wise",
        num_rows=table.num_rows,
        bytes=table_bytes(table),
        predicted_bytes_per_step=0.0,
        predicted_bytes_per_rank=0.0,
        predicted_inter_node_bytes_per_step=0.0,
        predicted_seconds_per_step=0.0,
    )
    return TablePlan(
        collection="sequence" if table.name in schema.sequence_tables else "pooled",
        placement=placement,
        sharding="table_wise",
        shards=(row_shard(rank, 0, table.num_rows, table.dim, topology),),
        tiers=(tier,),
        why=why,
    )
