"""Whether the rows that were read most stay the most read ones: the earlier half of the time against the later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recmill.artifacts import Dataset
from recmill.artifacts.profile import Drift, DriftShare
from recmill.data.dataset import read_rows
from recmill.profiling.counting import RowCounter
from recmill.profiling.sampling import Group, by_file
from recmill.profiling.skew import top_ranks

SEED = 0
MAX_GROUPS = 16  # row groups whose timestamps tell where the middle lies


def middle_time(dataset: Dataset, groups: Sequence[Group]) -> int:
    """About half of the rows are earlier than this: the median over evenly spaced row groups."""
    step = max(1, len(groups) // MAX_GROUPS)
    wanted = by_file(groups[::step])
    batches = read_rows(dataset, columns=["timestamp"], row_groups=wanted)
    found = np.concatenate([batch.column("timestamp").to_numpy() for batch in batches])
    # A time that occurs, so that both halves hold something unless all times are equal.
    return int(np.partition(found, len(found) // 2)[len(found) // 2])


def drift_figures(earlier: RowCounter, later: RowCounter, num_rows: int) -> Drift:
    """By share of the table's rows: what of the later reads its own most read rows take, and what the earlier ones do.

    `lost` is the part of the first that the second misses: 0 if popularity stands still, 1 if nothing stays. Where rows
    are read a few times, chance reorders them too: `lost_by_chance` is what the same reads, dealt out at random, lose.
    """
    num_earlier, num_later = int(earlier.counts.sum()), int(later.counts.sum())
    if not num_earlier or not num_later:
        return Drift(num_earlier=num_earlier, num_later=num_later, top_share={})
    shares = {}
    dealt_earlier, dealt_later = deal_out(earlier.counts + later.counts, num_earlier / (num_earlier + num_later))
    for share, top in top_ranks(num_rows).items():
        own, kept = covered(later, later, top), covered(later, earlier, top)
        dealt_own, dealt_kept = covered(dealt_later, dealt_later, top), covered(dealt_later, dealt_earlier, top)
        chance = 1 - dealt_kept / dealt_own if dealt_own else 0.0
        shares[share] = DriftShare(own=own, kept=kept, lost=1 - kept / own, lost_by_chance=chance)
    return Drift(num_earlier=num_earlier, num_later=num_later, top_share=shares)


def covered(reads: RowCounter, chosen_by: RowCounter, top: int) -> float:
    """The share of `reads` that go to the rows another counter has at the top."""
    return float(reads.counts[chosen_by.most_read(top)].sum() / max(1, int(reads.counts.sum())))


def deal_out(counts: np.ndarray, share: float) -> tuple[RowCounter, RowCounter]:
    """The reads divided at random, this share of them to the first."""
    first, second = RowCounter(0), RowCounter(0)
    first.counts = np.random.default_rng(SEED).binomial(counts, share)
    second.counts = counts - first.counts
    return first, second
