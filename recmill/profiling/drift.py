"""How much the most read rows change from the earlier half of the time to the later half."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recmill.artifacts import Dataset
from recmill.artifacts.profile import Drift, DriftShare
from recmill.data.dataset import read_rows
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


def drift_figures(earlier: np.ndarray, later: np.ndarray) -> Drift:
    """How many of the later reads go to the most read rows of the later half, and to those of the earlier half.

    `lost` is the part of the first that the second misses: 0 if popularity is stable, 1 if nothing stays. Rows that are
    read a few times also change order by chance: `lost_by_chance` is the loss when the same reads are split at random.
    """
    num_earlier, num_later = int(earlier.sum()), int(later.sum())
    if not num_earlier or not num_later:
        return Drift(num_earlier=num_earlier, num_later=num_later, top_share={})
    shares = {}
    share_earlier = num_earlier / (num_earlier + num_later)
    dealt_earlier = np.random.default_rng(SEED).binomial(earlier + later, share_earlier)
    dealt_later = earlier + later - dealt_earlier
    for share, top in top_ranks(len(later)).items():
        own, kept = covered(later, later, top), covered(later, earlier, top)
        dealt_own, dealt_kept = covered(dealt_later, dealt_later, top), covered(dealt_later, dealt_earlier, top)
        chance = 1 - dealt_kept / dealt_own if dealt_own else 0.0
        shares[share] = DriftShare(own=own, kept=kept, lost=1 - kept / own, lost_by_chance=chance)
    return Drift(num_earlier=num_earlier, num_later=num_later, top_share=shares)


def covered(reads: np.ndarray, chosen_by: np.ndarray, top: int) -> float:
    """The share of `reads` that go to the `top` rows with the highest counts in `chosen_by`, those above 0."""
    rows = np.argpartition(chosen_by, -top)[-top:] if top < len(chosen_by) else np.arange(len(chosen_by))
    return float(reads[rows[chosen_by[rows] > 0]].sum() / max(1, int(reads.sum())))
