"""A solved tier problem as plan.json says it: tiers of every table, what they cost, and a form that TorchRec takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from recmill.planning.tiers.costs import (
    KINDS,
    PHASES,
    STATE_BYTES_PER_ROW,
    WEIGHT_BYTES,
    phase_latency,
)
from recmill.planning.tiers.problem import TierProblem, table_memory, whole_rank_bytes
from recmill.planning.tiers.reads import TableReads
from recmill.planning.tiers.solution import Placement, Prediction, Solved, predict, table_rows
from recmill.planning.topology import LEVELS, Topology

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


def table_entries(problem: TierProblem, solved: Solved) -> dict[str, dict[str, Any]]:
    """{table: collection, placement, sharding, shards, tiers} for plan.json."""
    shared_out = RankLoad(problem.topology, problem.memory_budget_bytes)
    whole = {problem.tables[t].name: rank for t, rank in solved.placement.whole.items()}
    for t, rank in solved.placement.whole.items():
        shared_out.held[rank] += table_memory(problem.tables[t])
    entries = {}
    seconds = binding_seconds(problem, solved.prediction)
    for t, (table, placed) in enumerate(zip(problem.tables, placements(problem, solved).values(), strict=True)):
        sharding, shards = shared_out.torchrec_form(table, whole.get(table.name))
        entries[table.name] = {
            "collection": "pooled" if table.is_pooled else "sequence",
            "placement": "torchrec" if placed.rank is not None else "tiered",
            "sharding": sharding,
            "shards": shards,
            "tiers": _tiers(problem, solved, t, placed, seconds),
        }
    return entries


def _tiers(
    problem: TierProblem, solved: Solved, t: int, placed: TablePlacement, seconds_P: np.ndarray
) -> list[dict[str, Any]]:
    table, topology = problem.tables[t], problem.topology
    if placed.rank is not None:
        average, owner = problem.whole_bytes
        sent, slowest = average[t], owner[t]
        return [_tier("table_wise", table.num_rows, table_memory(table), sent, slowest, seconds_P, topology)]
    row = table.dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW
    copies = {"replicated": topology.world_size, "node": topology.nodes, "global": 1}
    return [
        _tier(kind, num_rows, num_rows * row * copies[kind], sent, sent, seconds_P, topology)
        for kind, num_rows, sent in zip(KINDS, placed.rows, solved.prediction.table_bytes[t], strict=True)
        if num_rows
    ]


def _tier(
    kind: str,
    num_rows: int,
    held_bytes: int,
    sent_P: np.ndarray,
    slowest_P: np.ndarray,
    seconds_P: np.ndarray,
    topology: Topology,
) -> dict[str, Any]:
    is_inter = np.arange(len(sent_P)) % len(LEVELS) == 1
    return {
        "kind": kind,
        "num_rows": num_rows,
        "bytes": held_bytes,  # over all ranks, copies included
        "predicted_bytes_per_step": float(sent_P.sum()) * topology.world_size,
        "predicted_bytes_per_rank": float(slowest_P.sum()),
        "predicted_inter_node_bytes_per_step": float(sent_P[is_inter].sum()) * topology.world_size,
        "predicted_seconds_per_step": float(seconds_P @ slowest_P),
    }


def binding_seconds(problem: TierProblem, prediction: Prediction) -> np.ndarray:
    """[P] seconds that a byte adds to the step: those of the level that its phase waits for, 0 for the other."""
    per_byte = problem.seconds_per_byte
    by_phase = (prediction.lane_bytes * per_byte).reshape(len(PHASES), len(LEVELS))
    binds = by_phase == by_phase.max(axis=1, keepdims=True)
    binds[:, 1] &= ~binds[:, 0]
    found: np.ndarray = per_byte * binds.reshape(-1)
    return found


def prediction_json(problem: TierProblem, solved: Solved) -> dict[str, Any]:
    """What a step is predicted to send and to take: by phase, in sum, and beside the plan with every row global."""
    prediction, topology = solved.prediction, problem.topology
    lanes = prediction.lane_bytes.reshape(len(PHASES), len(LEVELS))
    is_used = {phase.name: bool(lanes[p].any()) for p, phase in enumerate(PHASES)}
    phases = {
        phase.name: {
            "overlaps_with_compute": phase.is_overlapped,
            "intra_node_bytes": float(lanes[p, 0]),
            "inter_node_bytes": float(lanes[p, 1]),
            "seconds": prediction.phase_seconds[phase.name],
            "latency_s": phase_latency(phase, topology),
        }
        for p, phase in enumerate(PHASES)
        if is_used[phase.name]
    }
    by_rank = prediction.table_bytes.sum() + whole_rank_bytes(problem, solved.placement.whole).sum(axis=1)
    return {
        "seconds": prediction.seconds,
        "latency_seconds": prediction.latency_seconds,
        "bytes": traffic(problem, solved),
        "bytes_per_rank": [float(value) for value in by_rank],
        "phases": phases,
        "row_wise_dedup": _global_traffic(problem),
    }


def traffic(problem: TierProblem, solved: Solved) -> dict[str, float]:
    """Bytes a step over all ranks: by all-to-all, by the exchange of hot rows' gradients, between nodes, in total."""
    average, _ = problem.whole_bytes
    sent_P = solved.prediction.table_bytes.sum(axis=(0, 1)) + solved.prediction.count_bytes
    sent_P += average[list(solved.placement.whole)].sum(axis=0)
    return _sums(sent_P, problem.topology.world_size)


def _sums(sent_P: np.ndarray, world_size: int) -> dict[str, float]:
    is_all_to_all = np.repeat([phase.is_all_to_all for phase in PHASES], len(LEVELS))
    is_inter = np.arange(len(sent_P)) % len(LEVELS) == 1
    sent_P = sent_P * world_size
    return {
        "all_to_all": float(sent_P[is_all_to_all].sum()),
        "gradient_exchange": float(sent_P[~is_all_to_all].sum()),
        "inter_node": float(sent_P[is_inter].sum()),
        "total": float(sent_P.sum()),
    }


def _global_traffic(problem: TierProblem) -> dict[str, float]:
    every_row_global = predict(problem, Placement(rows=np.zeros((len(problem.segments), 2), np.int64)))
    sums = _sums(problem.dedup_bytes, problem.topology.world_size)
    return {"seconds": every_row_global.seconds, **sums}


class RankLoad:
    """Gives every table a placement that TorchRec takes, balancing whole tables over the ranks."""

    def __init__(self, topology: Topology, memory_budget_bytes: int) -> None:
        self.topology, self.budget = topology, memory_budget_bytes
        self.held = [0] * topology.world_size

    def torchrec_form(self, table: TableReads, rank: int | None) -> tuple[str, list[dict[str, Any]]]:
        """(sharding, shards): whole where the plan or TorchRec wants it, else by rows.

        TorchRec takes unpooled tables by rows; pooled ones are kept whole unless no rank has the memory.
        """
        need = table_memory(table)
        emptiest = self.held.index(min(self.held))
        if rank is None and table.is_pooled and self.held[emptiest] + need <= self.budget:
            rank = emptiest
            self.held[rank] += need
        if rank is not None:
            return "table_wise", [shard_entry(rank, 0, table.num_rows, table.dim, self.topology)]
        world = self.topology.world_size
        block = -(-table.num_rows // world)
        starts = [min(rank * block, table.num_rows) for rank in range(world + 1)]
        shards = []
        for rank, (start, stop) in enumerate(pairwise(starts)):
            self.held[rank] += need // world
            shards.append(shard_entry(rank, start, stop - start, table.dim, self.topology))
        return "row_wise", shards


def shard_entry(rank: int, start: int, num_rows: int, dim: int, topology: Topology) -> dict[str, Any]:
    return {
        "rank": rank,
        "local_rank": rank % topology.ranks_per_node,
        "offset": [start, 0],
        "size": [num_rows, dim],
    }


def single_rank_entries(tables: list[TableReads], topology: Topology) -> dict[str, dict[str, Any]]:
    """On one rank nothing travels: every table is kept whole, by TorchRec."""
    nothing: Mapping[str, float] = {
        "predicted_bytes_per_step": 0.0,
        "predicted_bytes_per_rank": 0.0,
        "predicted_inter_node_bytes_per_step": 0.0,
        "predicted_seconds_per_step": 0.0,
    }
    return {
        table.name: {
            "collection": "pooled" if table.is_pooled else "sequence",
            "placement": "torchrec",
            "sharding": "table_wise",
            "shards": [shard_entry(0, 0, table.num_rows, table.dim, topology)],
            "tiers": [{"kind": "table_wise", "num_rows": table.num_rows, "bytes": table_memory(table), **nothing}],
        }
        for table in tables
    }
