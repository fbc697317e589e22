"""The tier problem: how many of the most read rows of every table to replicate, keep once per node, or spread.

A segment is a table, or the part of it that starts from one tier of an older plan. What a placement costs is in
`solution.py`, the linear program in `linear_program.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from recmill.artifacts import InputError
from recmill.artifacts.topology import LEVELS, Topology
from recmill.data.schema import Table
from recmill.planning.tiers.costs import (
    DIRECT_PHASES,
    ID_BYTES,
    KINDS,
    NUM_LANES,
    PHASES,
    TORCHREC_ID_BYTES,
    WHOLE_PHASES,
    Routing,
    count_bytes,
    held_bytes,
    lane,
    lane_seconds_per_byte,
    phase_latency,
    row_bytes,
    whole_table_bytes,
)
from recmill.planning.tiers.reads import TableReads

# C = classes of rows, G = buckets of all segments, P = lanes (phase and level), K = kinds of tiers
TOTAL_MARGIN = 0.004  # measured at the interfaces, a plan at the limit sent 0.13% more than row-wise with distinct ids
REPLICATED, NODE, GLOBAL = range(len(KINDS))

# A table that may be kept whole; or what a group of tables may have: ("replicated", g) rows, ("copies", g) of any kind.
Decision: TypeAlias = int | tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The placements that agree with these decisions and whose phases take at least these seconds."""

    decided: Mapping[Decision, bool] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)  # by name, phases of whole tables only

    def with_decided(self, more: Mapping[Decision, bool]) -> Branch:
        return replace(self, decided={**self.decided, **more})

    def with_floor(self, phase: str, seconds: float) -> Branch:
        return replace(self, floors={**self.floors, phase: max(seconds, self.floors.get(phase, 0.0))})


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows of one table that start from the same tier, by falling reads."""

    table: int
    rows_C: np.ndarray
    reads_C: np.ndarray
    move_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # per step, to move one row to each kind

    @property
    def num_rows(self) -> int:
        return int(self.rows_C.sum())


@dataclass(frozen=True, kw_only=True)
class TierProblem:
    """Tables, ranks, and the limits a placement must keep."""

    tables: Sequence[TableReads]
    topology: Topology
    memory_budget_bytes: int
    total_bytes_ratio: float | None = 1.0  # bytes over all ranks at most this times those of the global plan
    segments: Sequence[Segment] = field(default=())
    routing: Routing = field(default_factory=Routing)

    def __post_init__(self) -> None:
        if not self.segments:
            whole = [
                Segment(table=t, rows_C=reads.rows_C, reads_C=reads.reads_C) for t, reads in enumerate(self.tables)
            ]
            object.__setattr__(self, "segments", tuple(whole))

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        return lane_seconds_per_byte(self.topology)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Tables that are exchanged together: of one width, and either all pooled or all not."""
        found: dict[tuple[bool, int], list[int]] = {}
        for t, table in enumerate(self.tables):
            found.setdefault((table.is_pooled, table.dim), []).append(t)
        return list(found.values())

    def latency(self, *phases: str) -> float:
        """Seconds of latency of some phases of one group."""
        return sum(phase_latency(phase, self.topology) for phase in PHASES if phase.name in phases)

    @cached_property
    def lookup_latency_s(self) -> float:
        return self.latency(*(phase.name for phase in self.routing.lookup_phases))

    @cached_property
    def whole_latency_s(self) -> float:
        return self.latency(*(phase.name for phase in WHOLE_PHASES))

    @cached_property
    def class_bytes(self) -> list[np.ndarray]:
        """[K, P, C] of every segment: bytes that a rank sends for one row of each class in each tier."""
        return [
            np.array([self.row_bytes(kind, s.reads_C, self.tables[s.table].dim) for kind in KINDS])
            for s in self.segments
        ]

    def row_bytes(self, kind: str, reads_C: np.ndarray, dim: int) -> np.ndarray:
        """[P, C] bytes that a rank sends in a step for one row of each class."""
        return row_bytes(kind, reads_C, dim, self.topology, self.routing)

    @cached_property
    def direct(self) -> TierProblem:
        """The same problem with every rank asking the holders of rows itself."""
        return replace(self, routing=replace(self.routing, merges_nodes=False)) if self.routing.merges_nodes else self

    @cached_property
    def global_bytes(self) -> np.ndarray:
        """[tables, P] bytes of a rank with every row global."""
        found = np.zeros((len(self.tables), NUM_LANES))
        for segment, bytes_KPC in zip(self.segments, self.class_bytes, strict=True):
            found[segment.table] += bytes_KPC[GLOBAL] @ segment.rows_C
        return found

    @cached_property
    def whole_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """([tables, P] averaged over ranks, [tables, P] at the owner) of tables kept whole."""
        owner = np.array([whole_table_bytes(table, self.topology) for table in self.tables])
        return owner / self.topology.world_size, owner

    @cached_property
    def owner_seconds(self) -> np.ndarray:
        """[tables, whole phases] minimum seconds of every phase of whole tables if the table is one of them."""
        _, owner = self.whole_bytes
        seconds = (owner * self.seconds_per_byte).reshape(len(self.tables), len(PHASES), len(LEVELS)).max(axis=2)
        found: np.ndarray = seconds[:, -len(WHOLE_PHASES) :]
        return found

    @cached_property
    def candidates(self) -> list[int]:
        """Tables that may be kept whole: pooled, fitting one rank, and then sending less than their distinct rows."""
        average, _ = self.whole_bytes
        spread = sum(map(self.global_memory, self.tables))
        return [
            t
            for t, table in enumerate(self.tables)
            if table.is_pooled
            and table_bytes(table) + spread - self.global_memory(table) <= self.memory_budget_bytes
            and average[t].sum() < self.global_bytes[t].sum()
        ]

    @cached_property
    def dedup_bytes(self) -> np.ndarray:
        """[P] bytes of a rank with every row global and ids as TorchRec sends them: row-wise with distinct ids."""
        wider = np.ones(NUM_LANES)
        wider[[lane("ids", level) for level in LEVELS]] = TORCHREC_ID_BYTES / ID_BYTES
        found: np.ndarray = self.direct.global_bytes.sum(axis=0) * wider + self._id_counts
        return found

    @property
    def _id_counts(self) -> np.ndarray:
        """[P] bytes that announce the number of ids, over all groups."""
        return count_bytes(DIRECT_PHASES[0], self.topology) * len(self.groups)

    @cached_property
    def total_limit(self) -> float:
        """Bytes that all ranks together may send; never below those of every row global and asked for directly."""
        if self.total_bytes_ratio is None:
            return np.inf
        every_row_global = float(self.direct.global_bytes.sum() + self._id_counts.sum())
        allowed = self.total_bytes_ratio * (1 - TOTAL_MARGIN) * float(self.dedup_bytes.sum())
        return max(allowed, every_row_global) * self.topology.world_size

    def global_memory(self, table: TableReads) -> float:
        """Bytes a rank needs for a table with every row global: the largest rank's."""
        return -(-table.num_rows // self.topology.world_size) * held_bytes(table.dim)

    def check_feasible(self) -> None:
        """Raise if even the smallest placement, with every row on one rank only, does not fit."""
        check_total(self.tables, self.topology, self.memory_budget_bytes)
        striped = int(sum(map(self.global_memory, self.tables)))
        if striped > self.memory_budget_bytes:
            raise InputError(
                f"the first rank needs {striped:,} B (rows and optimiser state, rows divided evenly), the budget is "
                f"{self.memory_budget_bytes:,} B per rank: {striped - self.memory_budget_bytes:,} B too little; "
                f"largest: {_largest(self.tables)}"
            )


def check_total(tables: Sequence[TableReads | Table], topology: Topology, budget_bytes: int) -> None:
    """Raise if the tables together exceed the memory of all ranks."""
    total, available = sum(map(table_bytes, tables)), budget_bytes * topology.world_size
    if total > available:
        raise InputError(
            f"the tables need {total:,} B (rows and optimiser state), {topology.world_size} ranks with a budget of "
            f"{budget_bytes:,} B each have {available:,} B: {total - available:,} B too little; largest: "
            f"{_largest(tables)}"
        )


def _largest(tables: Sequence[TableReads | Table]) -> str:
    largest = sorted(tables, key=table_bytes, reverse=True)[:3]
    return ", ".join(f"{table.name} {table_bytes(table):,} B" for table in largest)


def table_bytes(table: TableReads | Table) -> int:
    """Rows and optimiser state."""
    return table.num_rows * held_bytes(table.dim)


def whole_rank_bytes(problem: TierProblem, whole: Mapping[int, int]) -> np.ndarray:
    """[ranks, P] bytes of tables kept whole: an owner serves all others, the others receive their part.

    A rank's bytes are the larger of what it sends and what it receives.
    """
    _, owner = problem.whole_bytes
    world = problem.topology.world_size
    serves = np.zeros((world, NUM_LANES))
    asks = np.zeros((world, NUM_LANES))
    peers = np.array([problem.topology.ranks_per_node - 1, world - problem.topology.ranks_per_node] * len(PHASES))
    for table, rank in whole.items():
        serves[rank] += owner[table]
        part = owner[table] / np.maximum(peers, 1)
        is_near = np.arange(world) // problem.topology.ranks_per_node == rank // problem.topology.ranks_per_node
        asks[is_near, 0::2] += part[0::2]
        asks[~is_near, 1::2] += part[1::2]
        asks[rank] -= np.where(np.arange(NUM_LANES) % 2 == 0, part, 0.0)
    return np.maximum(serves, asks)
