"""Chooses the tables to keep whole and their ranks, so that no rank serves or holds much more than the others.

All ranks wait for the slowest one in each phase; so a large table that others cannot balance costs more than its bytes,
and may be better placed in tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recmill.planning.tiers.costs import PHASE_NAMES, WHOLE_PHASES
from recmill.planning.tiers.linear_program import LinearSolution
from recmill.planning.tiers.problem import TierProblem, table_bytes

# T = tables that may be kept whole, W = ranks, S = scales on which ranks must be even: phases of whole tables, memory
MAX_SHARES = (1.0, 1.03, 1.07, 1.12, 1.2, 1.3, 1.5, 2.0, 4.0, 1e9)  # of the relaxed load per rank
NUM_EVENED = 3  # packings that are balanced afterwards
MAX_CHANGES = 600
POWER = 16  # balance is the sum of loads to this power: unlike the maximum, it depends on every rank
NOWHERE = -1


def place_whole(problem: TierProblem, relaxed: LinearSolution, gains: np.ndarray) -> dict[int, int]:
    """The best ranks found for the tables that a relaxed solution keeps whole, at least in part.

    `gains`: seconds that a table saves at the relaxed solution's prices, before the time of its own phases. Tables are
    packed under several limits of a rank's load; what does not fit goes to tiers. The best packings are then balanced.
    """
    tables = [t for t in problem.candidates if relaxed.whole[t] > 1e-3]
    if not tables:
        return {}
    names = [PHASE_NAMES.index(phase.name) for phase in WHOLE_PHASES]
    packer = _Packer.of(problem, tables, gains[tables], max(relaxed.memory_price, 0.0))
    held_s = float(packer.load_TS[:, -1] @ relaxed.whole[tables]) / problem.topology.world_size
    relaxed_S = np.append(relaxed.phase_seconds[names], held_s)
    packed = [packer.pack(share * relaxed_S, fills=fills) for share in MAX_SHARES for fills in (True, False)]
    packed.sort(key=packer.saved_s, reverse=True)
    best = max((packer.even_out(rank_T) for rank_T in packed[:NUM_EVENED]), key=packer.saved_s)
    if packer.saved_s(best) <= 0:
        return {}
    return {table: rank for table, rank in zip(tables, best.tolist(), strict=True) if rank != NOWHERE}


@dataclass(frozen=True, kw_only=True)
class _Packer:
    """Tables that may be kept whole; a packing is the rank of each of them, or NOWHERE."""

    num_ranks: int
    load_TS: np.ndarray  # seconds that a table costs the rank that keeps it: in every phase, and for its memory
    memory_T: np.ndarray  # bytes on the rank that keeps it
    spread_T: np.ndarray  # bytes on every rank if it is not kept whole
    gain_T: np.ndarray  # seconds
    room_bytes: float  # per rank, after tables that cannot be kept whole

    @classmethod
    def of(cls, problem: TierProblem, tables: list[int], gain_T: np.ndarray, memory_price: float) -> _Packer:
        budget = problem.memory_budget_bytes
        memory_T = np.array([table_bytes(problem.tables[t]) for t in tables], float)
        spread = np.array([problem.global_memory(table) for table in problem.tables])
        return cls(
            num_ranks=problem.topology.world_size,
            load_TS=np.column_stack([problem.owner_seconds[tables], memory_T * memory_price / budget]),
            memory_T=memory_T,
            spread_T=spread[tables],
            gain_T=gain_T,
            room_bytes=budget - float(spread.sum() - spread[tables].sum()),
        )

    def loads(self, rank_T: np.ndarray, values_TX: np.ndarray) -> np.ndarray:
        """[W, X] sums of the tables' values on every rank."""
        placed = rank_T != NOWHERE
        sums = np.zeros((self.num_ranks, values_TX.shape[1]))
        np.add.at(sums, rank_T[placed], values_TX[placed])
        return sums

    def saved_s(self, rank_T: np.ndarray) -> float:
        """Seconds saved at the given prices, compared with keeping no table whole."""
        slowest = self.loads(rank_T, self.load_TS).max(axis=0).sum()
        return float(self.gain_T[rank_T != NOWHERE].sum() - slowest)

    def room(self, rank_T: np.ndarray) -> float:
        """Bytes per rank for whole tables."""
        return self.room_bytes - float(self.spread_T[rank_T == NOWHERE].sum())

    def pack(self, limit_S: np.ndarray, *, fills: bool) -> np.ndarray:
        """Assign tables, largest first, to the fullest rank that still has room (`fills`) or to the emptiest one."""
        limit_S = np.maximum(limit_S, 1e-12)
        load_SW, held_W = np.zeros((len(limit_S), self.num_ranks)), np.zeros(self.num_ranks)
        rank_T = np.full(len(self.gain_T), NOWHERE)
        room, num_used = self.room_bytes, 0
        for t in np.argsort(-(self.load_TS / limit_S).max(axis=1), kind="stable").tolist():
            ranks = slice(num_used + 1)  # empty ranks are alike: the first of them is enough
            after_SW = load_SW[:, ranks] + self.load_TS[t][:, None]
            fits = np.flatnonzero(
                (after_SW <= limit_S[:, None]).all(axis=0) & (held_W[ranks] + self.memory_T[t] <= room)
            )
            if not len(fits):
                room -= self.spread_T[t]
                continue
            fullness = after_SW[:, fits].sum(axis=0)
            rank = int(fits[np.argmax(fullness) if fills else np.argmin(fullness)])
            load_SW[:, rank], rank_T[t] = after_SW[:, rank], rank
            held_W[rank] += self.memory_T[t]
            num_used = max(num_used, rank + 1)
        return rank_T if held_W.max() <= room else np.full(len(rank_T), NOWHERE)

    def even_out(self, rank_T: np.ndarray) -> np.ndarray:
        """Move or swap tables as long as that balances the ranks."""
        rank_T = rank_T.copy()
        mean_S = self.loads(rank_T, self.load_TS).mean(axis=0)
        used = mean_S > 0
        if not used.any():
            return rank_T
        share_TS, weight_S = self.load_TS[:, used] / mean_S[used], mean_S[used]
        room = self.room(rank_T)
        for _ in range(MAX_CHANGES):
            load = self.loads(rank_T, share_TS)
            held = self.loads(rank_T, self.memory_T[:, None])[:, 0]
            fullest = dict.fromkeys(np.argmax(load, axis=0).tolist())
            found = (self._best_change(rank_T, load, held, share_TS, weight_S, rank, room) for rank in fullest)
            change = next((own for own in found if own is not None), None)
            if change is None:
                break
            for table, rank in change:
                rank_T[table] = rank
        return rank_T

    def _best_change(
        self,
        rank_T: np.ndarray,
        load: np.ndarray,
        held: np.ndarray,
        share_TS: np.ndarray,
        weight_S: np.ndarray,
        rank: int,
        room: float,
    ) -> list[tuple[int, int]] | None:
        """The best move of a table away from a rank, or swap with another table; None if nothing helps."""
        own = np.flatnonzero(rank_T == rank)
        others = np.flatnonzero((rank_T != rank) & (rank_T != NOWHERE))
        places = np.array([other for other in range(self.num_ranks) if other != rank], int)
        to = np.concatenate([rank_T[others], places])  # a partner, or nobody
        back_S = np.concatenate([share_TS[others], np.zeros((len(places), share_TS.shape[1]))])
        back_bytes = np.concatenate([self.memory_T[others], np.zeros(len(places))])
        powers = load**POWER
        rest = powers.sum(axis=0) - powers[rank] - powers[to]
        moved = share_TS[own][:, None, :] - back_S  # [own, partners, S]
        after = rest + np.clip(load[rank] - moved, 0, None) ** POWER + np.clip(load[to] + moved, 0, None) ** POWER
        cost = np.clip(after, 0, None) ** (1 / POWER) @ weight_S
        more = self.memory_T[own][:, None] - back_bytes
        cost[(held[rank] - more > room) | (held[to] + more > room)] = np.inf
        if not cost.size:
            return None
        now = float(powers.sum(axis=0) ** (1 / POWER) @ weight_S)
        first, partner = np.unravel_index(np.argmin(cost), cost.shape)
        if cost[first, partner] >= now * (1 - 1e-6):
            return None
        change = [(int(own[first]), int(to[partner]))]
        return change + ([(int(others[partner]), rank)] if partner < len(others) else [])
