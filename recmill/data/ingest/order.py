"""Which rows go to which batch of which rank. Pure functions, so that every rank computes the same answer alone.

The row groups of an epoch, in a permuted order, form one stream of N rows. It is cut into L lanes, and every global
batch takes a fixed number of rows from each lane; rank r of W owns L / W neighbouring lanes:

    stream   |---------------- N rows ----------------|
    lanes    |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|       L = 4, W = 2
    batch 0   ##        ##        ##        ##
    batch 1     ##        ##        ##        ##
    owner     rank 0    rank 0    rank 1    rank 1

So a rank reads its own row groups only, and a global batch is the same set of rows at every W that divides L.

Neighbouring rows of a row group belong to one hour or one user: trained in a row, they would pull the model towards
it. So the rows that a lane gives to successive batches, runs of neighbours, come from different places: a lane has
parts that take turns, and the runs of a row group are permuted. A batch is still cut from one piece per lane, which
rarely splits a session; a row group is held until all of its runs have been used:

    lane     |-- part 0 --|-- part 1 --|      runs of 2 parts, row groups A to D of 3 runs each
              A1 A2 A3 B1.. C1 C2 C3 D1..
    read      A2 C1 A3 C3 A1 C2 B1 D3 ..

Where sessions are stored together, a batch holds them whole. With a limit, the rows of a row group are read in another
order first: `spread_sessions` cuts sessions into pieces and permutes these, so that a session meets several batches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

# Saved positions are valid in one version only: 1 did not permute runs, 2 permuted pieces of sessions by folder, too.
ORDER_VERSION = 3
MIN_LANES = 8  # a power of two, so that a run on 1, 2, 4 or 8 ranks resumes on any other of these
MAX_PARTS = 4  # per lane: 8 give no better AUC on globo, and each holds a row group


def num_lanes_for(world_size: int) -> int:
    """The smallest multiple of `world_size` that is at least MIN_LANES."""
    return world_size * -(-MIN_LANES // world_size)


def permute_groups(num_groups: int, *, seed: int, epoch: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """The order in which an epoch visits the row groups."""
    if not shuffle:
        return np.arange(num_groups)
    return np.random.default_rng((seed, epoch)).permutation(num_groups)


def lane_quotas(batch_size: int, num_lanes: int) -> list[int]:
    """How many rows a full global batch takes from each lane."""
    return [(lane + 1) * batch_size // num_lanes - lane * batch_size // num_lanes for lane in range(num_lanes)]


def lane_bounds(num_rows: int, batch_size: int, num_lanes: int) -> list[int]:
    """Where the lanes begin in the stream of rows, and the end of the last one.

    A lane's length is proportional to its quota (if `num_lanes` divides `batch_size`, lane l begins at
    l * num_rows // num_lanes), so that all lanes are exhausted in the same batch, the last one.
    """
    return [lane * batch_size // num_lanes * num_rows // batch_size for lane in range(num_lanes + 1)]


def permute_runs(
    edges: Sequence[int], quota: int, *, num_parts: int = 1, seed: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """Which run of `quota` rows each batch takes from a lane; `edges` are the starts of its row groups and its end.

    Runs within one row group are permuted among themselves, then the parts take turns. Rows that do not fill a run come
    last. Without a seed, runs stay in stored order.
    """
    runs = np.arange(-(-edges[-1] // quota) if quota else 0)
    if seed is None or not len(runs):
        return runs
    rng, whole = np.random.default_rng(seed), runs[: edges[-1] // quota]
    for begin, end in pairwise(edges):
        rng.shuffle(whole[-(-begin // quota) : end // quota])
    turns = np.concatenate([np.arange(len(part)) for part in np.array_split(whole, num_parts)])
    whole[:] = whole[np.argsort(turns, kind="stable")]
    return runs


def spread_sessions(sizes_S: npt.NDArray[np.integer], *, limit: int, seed: Sequence[int]) -> npt.NDArray[np.int64]:
    """The rows of a row group in the order to read them: sessions in pieces of at most `limit` rows, permuted.

    `sizes_S` are the rows of its sessions, in stored order. Rows of a piece stay together.
    """
    num_pieces_S = -(-sizes_S // limit)
    first_S = np.cumsum(num_pieces_S) - num_pieces_S
    session_P = np.repeat(np.arange(len(sizes_S)), num_pieces_S)
    number_P = np.arange(len(session_P)) - first_S[session_P]
    sizes_P = sizes_S[session_P] // num_pieces_S[session_P]
    sizes_P += number_P < sizes_S[session_P] % num_pieces_S[session_P]
    starts_P = np.cumsum(sizes_P) - sizes_P
    chosen_P = np.random.default_rng(seed).permutation(len(session_P))
    sizes_P, starts_P = sizes_P[chosen_P], starts_P[chosen_P]
    order_R: npt.NDArray[np.int64] = np.repeat(starts_P - (np.cumsum(sizes_P) - sizes_P), sizes_P)
    return order_R + np.arange(len(order_R))


@dataclass(frozen=True, kw_only=True)
class Item:
    """One row group as the pipeline reads it, and the batches that use it."""

    group: int
    first_batch: int
    last_batch: int


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The rows of one lane: piece i begins at row `starts[i]` of the lane, which is row `rows[i]` of its item.

    Batch b takes run `runs[b]` of `quota` rows.
    """

    quota: int
    num_rows: int
    runs: npt.NDArray[np.int64]
    starts: list[int]
    rows: list[int]
    items: list[int]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """What one rank reads in one epoch: items in order of first use, and how batches are cut from them."""

    num_batches: int
    items: list[Item]
    lanes: list[Lane]
    first_batches: list[int]  # of the items, ascending

    def slices(self, batch: int) -> list[tuple[int, int, int]]:
        """(item, start, stop): the rows of this rank's share of a batch, in lane order."""
        found = []
        for lane in self.lanes:
            if batch >= len(lane.runs):
                continue
            row = int(lane.runs[batch]) * lane.quota
            stop = min(row + lane.quota, lane.num_rows)
            piece = bisect_right(lane.starts, row) - 1
            while row < stop:
                end = lane.starts[piece + 1] if piece + 1 < len(lane.starts) else lane.num_rows
                upto, offset = min(stop, end), lane.rows[piece] - lane.starts[piece]
                found.append((lane.items[piece], row + offset, upto + offset))
                row, piece = upto, piece + 1
        return found

    def num_needed(self, batch: int) -> int:
        """How many items, from the first on, must be ready before this batch can be cut."""
        return bisect_right(self.first_batches, batch)


def count_batches(num_rows: int, batch_size: int) -> int:
    return -(-num_rows // batch_size)


def global_batch_rows(batch: int, *, num_rows: int, batch_size: int) -> int:
    """Rows of a global batch over all ranks: only the last batch of an epoch may be short."""
    return max(0, min(batch_size, num_rows - batch * batch_size))


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The part of a row group in a lane, from row `start` of the lane on."""

    position: int  # of the row group in the epoch's order
    start: int
    first_batch: int
    last_batch: int


def _lane_pieces(
    edges: Sequence[int], *, first: int, quota: int, runs: npt.NDArray[np.int64], first_batch: int
) -> list[_Piece]:
    """The pieces that batches from `first_batch` on use of a lane that begins in the row group at position `first`."""
    batch_of_run = np.argsort(runs)
    found = []
    for position, (start, stop) in enumerate(pairwise(edges) if quota else (), first):
        users = batch_of_run[start // quota : -(-stop // quota)]
        users = users[users >= first_batch]
        if len(users):
            used = {"first_batch": int(users.min()), "last_batch": int(users.max())}
            found.append(_Piece(position=position, start=start, **used))
    return found


def plan_epoch(
    group_rows: Sequence[int],
    *,
    order: Sequence[int] | npt.NDArray[np.int64],
    batch_size: int,
    num_lanes: int,
    num_parts: int = 1,
    seed: Sequence[int] | None = None,
    rank: int = 0,
    world_size: int = 1,
    first_batch: int = 0,
    share_items: bool = True,
) -> EpochPlan:
    """The reading plan of `rank` for the row groups taken in `order`, from `first_batch` on; `seed` permutes runs.

    A row group in several lanes of the rank is one item, held until its last use (`share_items`), or one item per
    lane, which reads it again but takes less memory.
    """
    assert num_lanes % world_size == 0, f"{num_lanes} lanes cannot be divided among {world_size} ranks"
    ordered = [int(group) for group in order]
    begins = np.concatenate([[0], np.cumsum([group_rows[group] for group in ordered])]).tolist()
    num_rows = begins[-1]
    bounds, quotas = lane_bounds(num_rows, batch_size, num_lanes), lane_quotas(batch_size, num_lanes)
    owned = range(rank * num_lanes // world_size, (rank + 1) * num_lanes // world_size)
    runs, pieces = [], []
    for lane in owned:
        begin, end, quota = bounds[lane], bounds[lane + 1], quotas[lane]
        first = bisect_right(begins, begin)
        edges = [0, *(edge - begin for edge in begins[first : bisect_left(begins, end)]), end - begin]
        own = None if seed is None else (*seed, lane)
        runs.append(permute_runs(edges, quota, num_parts=num_parts, seed=own))
        pieces.append(_lane_pieces(edges, first=first - 1, quota=quota, runs=runs[-1], first_batch=first_batch))
    spans: dict[tuple[int, int], tuple[int, int]] = {}  # (position in the order, lane or -1) -> first and last batch
    keys_of = [[(piece.position, -1 if share_items else lane) for piece in own] for lane, own in enumerate(pieces)]
    for key, piece in zip(chain(*keys_of), chain(*pieces), strict=True):
        first, last = spans.get(key, (piece.first_batch, piece.last_batch))
        spans[key] = min(first, piece.first_batch), max(last, piece.last_batch)
    keys = sorted(spans, key=lambda key: (spans[key][0], key))
    index = {key: number for number, key in enumerate(keys)}
    return EpochPlan(
        num_batches=count_batches(num_rows, batch_size),
        items=[Item(group=ordered[key[0]], first_batch=spans[key][0], last_batch=spans[key][1]) for key in keys],
        lanes=[
            Lane(
                quota=quotas[lane],
                num_rows=bounds[lane + 1] - bounds[lane],
                runs=own_runs,
                starts=[piece.start for piece in own],
                rows=[bounds[lane] + piece.start - begins[piece.position] for piece in own],
                items=[index[key] for key in own_keys],
            )
            for lane, own_runs, own, own_keys in zip(owned, runs, pieces, keys_of, strict=True)
        ],
        first_batches=[spans[key][0] for key in keys],
    )


@dataclass(frozen=True, kw_only=True)
class Order:
    """Everything that determines which rows a rank sees when; the ranks of a run differ in `rank` alone."""

    group_rows: tuple[int, ...]
    batch_size: int
    num_lanes: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    num_parts: int = MAX_PARTS

    @cached_property
    def num_rows(self) -> int:
        return sum(self.group_rows)

    @cached_property
    def batches_per_epoch(self) -> int:
        return count_batches(self.num_rows, self.batch_size)

    @property
    def num_own_lanes(self) -> int:
        return self.num_lanes // self.world_size

    def plan(self, epoch: int, *, first_batch: int = 0, share_items: bool = True) -> EpochPlan:
        return plan_epoch(
            self.group_rows,
            order=permute_groups(len(self.group_rows), seed=self.seed, epoch=epoch, shuffle=self.shuffle),
            batch_size=self.batch_size,
            num_lanes=self.num_lanes,
            num_parts=self.num_parts,
            seed=(self.seed, epoch) if self.shuffle else None,
            rank=self.rank,
            world_size=self.world_size,
            first_batch=first_batch,
            share_items=share_items,
        )
