"""Which rows go to which batch of which rank. Pure functions, so that every rank finds the same answer alone.

The row groups of an epoch, in a permuted order, form one stream of N rows. It is cut into L lanes, and every global
batch takes a fixed number of rows from each lane; rank r of W owns L / W neighbouring lanes:

    stream   |---------------- N rows ----------------|
    lanes    |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|       L = 4, W = 2
    batch 0   ##        ##        ##        ##
    batch 1     ##        ##        ##        ##
    owner     rank 0    rank 0    rank 1    rank 1

So a rank reads its own row groups only, and a global batch is the same set of rows at every W that divides L.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_LANES = 8  # a power of two, so that a run at 1, 2, 4 or 8 ranks resumes at any other of them


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

    A lane's length is proportional to its quota (for a `batch_size` that num_lanes divides: lane l begins at
    l * num_rows // num_lanes), so that all lanes run dry in the same batch, the last one.
    """
    return [lane * batch_size // num_lanes * num_rows // batch_size for lane in range(num_lanes + 1)]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One row group as the pipeline reads it, and the batches that use it."""

    group: int
    first_batch: int
    last_batch: int


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The rows of one lane: piece i begins at row `starts[i]` of the lane, which is row `rows[i]` of its item."""

    quota: int
    num_rows: int
    starts: list[int]
    rows: list[int]
    items: list[int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows [start, stop) of an item."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """What one rank reads in one epoch: items in the order of their first use, and how batches are cut from them."""

    num_batches: int
    items: list[Item]
    lanes: list[Lane]
    first_batches: list[int]  # of the items, ascending

    def sources(self, batch: int) -> list[Source]:
        """Where the rows of this rank's share of a batch lie, in lane order."""
        found = []
        for lane in self.lanes:
            row, stop = batch * lane.quota, min((batch + 1) * lane.quota, lane.num_rows)
            piece = bisect_right(lane.starts, row) - 1
            while row < stop:
                end = lane.starts[piece + 1] if piece + 1 < len(lane.starts) else lane.num_rows
                upto, offset = min(stop, end), lane.rows[piece] - lane.starts[piece]
                found.append(Source(item=lane.items[piece], start=row + offset, stop=upto + offset))
                row, piece = upto, piece + 1
        return found

    def num_needed(self, batch: int) -> int:
        """How many items, from the first on, must be ready before this batch can be cut."""
        return bisect_right(self.first_batches, batch)


def count_batches(num_rows: int, batch_size: int) -> int:
    return -(-num_rows // batch_size)


def global_batch_rows(batch: int, *, num_rows: int, batch_size: int) -> int:
    """How many rows a global batch has over all ranks: only the last one of an epoch may be short."""
    return max(0, min(batch_size, num_rows - batch * batch_size))


def plan_epoch(
    group_rows: Sequence[int],
    *,
    order: Sequence[int] | npt.NDArray[np.int64],
    batch_size: int,
    num_lanes: int,
    rank: int = 0,
    world_size: int = 1,
    first_batch: int = 0,
    share_items: bool = True,
) -> EpochPlan:
    """The reading plan of `rank` for the row groups taken in `order`, from `first_batch` on.

    A row group that lies in several lanes of the rank is one item, held until its last use (`share_items`), or one
    item a lane, read again: more reading, less memory.
    """
    assert num_lanes % world_size == 0, f"{num_lanes} lanes cannot be shared out to {world_size} ranks"
    ordered = [int(group) for group in order]
    begins = np.concatenate([[0], np.cumsum([group_rows[group] for group in ordered])]).tolist()
    num_rows = begins[-1]
    bounds, quotas = lane_bounds(num_rows, batch_size, num_lanes), lane_quotas(batch_size, num_lanes)
    owned = range(rank * num_lanes // world_size, (rank + 1) * num_lanes // world_size)
    spans: dict[tuple[int, int], tuple[int, int]] = {}  # (position in the order, lane or -1) -> first and last batch
    cuts: list[list[tuple[int, int, tuple[int, int]]]] = []  # a lane: (start in lane, row in group, key of its span)
    for lane in owned:
        begin, end, quota = bounds[lane], bounds[lane + 1], quotas[lane]
        position = bisect_right(begins, begin) - 1
        cut = []
        while begin < end and position < len(ordered):
            start, stop = max(begin, begins[position]), min(end, begins[position + 1])
            first, last = (start - begin) // quota, (stop - 1 - begin) // quota
            if start < stop and last >= first_batch:
                key = (position, -1 if share_items else lane)
                known = spans.get(key, (first, last))
                spans[key] = (max(first_batch, min(first, known[0])), max(last, known[1]))
                cut.append((start - begin, start - begins[position], key))
            if stop == end:
                break
            position += 1
        cuts.append(cut)
    keys = sorted(spans, key=lambda key: (spans[key][0], key))
    index = {key: number for number, key in enumerate(keys)}
    return EpochPlan(
        num_batches=count_batches(num_rows, batch_size),
        items=[Item(group=ordered[key[0]], first_batch=spans[key][0], last_batch=spans[key][1]) for key in keys],
        lanes=[
            Lane(
                quota=quotas[lane],
                num_rows=bounds[lane + 1] - bounds[lane],
                starts=[start for start, _, _ in cut],
                rows=[row for _, row, _ in cut],
                items=[index[key] for _, _, key in cut],
            )
            for lane, cut in zip(owned, cuts, strict=True)
        ],
        first_batches=[spans[key][0] for key in keys],
    )


@dataclass(frozen=True, kw_only=True)
class Order:
    """Everything that decides which rows a rank sees when; two ranks that differ in `rank` alone fit together."""

    group_rows: tuple[int, ...]
    batch_size: int
    num_lanes: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)

    @property
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
            rank=self.rank,
            world_size=self.world_size,
            first_batch=first_batch,
            share_items=share_items,
        )
