"""How much the most read rows change from the earlier half of the time to the later half."""

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
MAX_GROUPS = 16  # row groups whose timestamps are read


def middle_time(dataset: Dataset, groups: Sequence[Group]) -> int:
    """The median timestamp of evenly spaced row groups: about half of the rows are earlier."""
    step = max(1, len(groups) // MAX_GROUPS)
    wanted = by_file(groups[::step])
    batches = read_rows(dataset, columns=["timestamp"], row_groups=wanted)
    found = np.concatenate([batch.column("timestamp").to_numpy() for batch in batches])
    # A time that occurs, so that both halves hold rows unless all times are equal.
    return int(np.partition(found, len(found) // 2)[len(found) // 2])


def drift_figures(earlier: RowCounter, later: RowCounter, num_rows: int) -> Drift:
    """How many of the later reads go to the most read rows of the later half, and to those of the earlier half.

    `lost` is the part of the first that the second misses: 0 if popularity is stable, 1 if nothing stays. Rows that are
    read a few times also change order by chance: `lost_by_chance` is the loss when the same reads are split at random.
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
    """The share of `reads` that go to the most read rows of `chosen_by`."""
    return float(reads.counts[chosen_by.most_read(top)].sum() / max(1, int(reads.counts.sum())))


def deal_out(counts: np.ndarray, share: float) -> tuple[RowCounter, RowCounter]:
    """The reads split at random, with this share of them in the first counter."""
    first, second = RowCounter(0), RowCounter(0)
    first.counts = np.random.default_rng(SEED).binomial(counts, share)
    second.counts = counts - first.counts
    return first, second
