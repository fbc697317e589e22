"""The linear programme: the fewest workers for the highest rate that cores, slots and memory allow.

    maximise X   subject to   w_i >= X * seconds_i,   sum_i X * cpu_i <= cores,   sum_i w_i <= slots,
                              sum_i w_i * bytes_i <= free memory,   X <= demand,   w_i >= 1 and whole

For a given X the minimum of w_i is ceil(X * seconds_i), and their use of resources grows with X, so bisection finds the
best X.
"""

from __future__ import annotations

import numpy as np

from recmill.tuning.guard import fits
from recmill.tuning.measurement import Floats, Ints, Limits

NUM_HALVINGS = 16


def solve_workers(
    seconds_BS: Floats, cpu_BS: Floats, limits: Limits, *, demand_B: Floats | None = None
) -> tuple[Ints, Floats]:
    """(workers per stage, the rate that the programme expects of them), within the limits of `limits`."""
    most_B = limits.cores_B / np.maximum(cpu_BS.sum(axis=1), 1e-12)
    # Stages that mostly wait leave cores idle: then the slots are the limit.
    most_B = np.minimum(most_B, limits.slots_B / np.maximum(seconds_BS.sum(axis=1), 1e-12))
    if demand_B is not None:
        most_B = np.minimum(most_B, demand_B)
    is_inside = fits(_least_workers(most_B, seconds_BS), limits)
    if not is_inside.all():
        low_B, high_B = np.zeros_like(most_B), most_B
        for _ in range(NUM_HALVINGS):
            middle_B = (low_B + high_B) / 2
            is_low = fits(_least_workers(middle_B, seconds_BS), limits)
            low_B, high_B = np.where(is_low, middle_B, low_B), np.where(is_low, high_B, middle_B)
        most_B = np.where(is_inside, most_B, low_B)
    return _least_workers(most_B, seconds_BS), most_B


def _least_workers(rate_B: Floats, seconds_BS: Floats) -> Ints:
    workers_BS: Ints = np.maximum(1, np.ceil(rate_B[:, None] * seconds_BS - 1e-6)).astype(np.int64)
    return workers_BS
