"""What a controller knows when it decides: figures of the last interval, the same from the simulator and from life.

Shape suffixes: B = pipelines (1 in life, many in simulation), S = stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_STALL = 0.98  # a consumer that only waits says nothing about how fast it could be


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One interval of B pipelines."""

    workers_BS: Ints
    seconds_BS: Floats  # a worker's seconds a row, time in which it waits for a core left out
    cpu_BS: Floats  # of those, seconds on a core
    queue_BS: Floats  # how full the queue before each stage is, 0 to 1
    rows_per_s_B: Floats  # what the consumer got
    stall_B: Floats  # share of the time that the consumer waited
    cores_B: Floats  # cores that ingestion may keep busy
    slots_B: Ints  # most workers of all stages together
    item_bytes_BS: Floats  # the most a worker of the stage holds
    base_bytes_B: Floats  # held whatever the workers: one batch and the row groups it is cut from
    memory_bytes_B: Floats  # held now
    limit_bytes_B: Floats
    failed_B: Bools  # it ran out of memory in this interval

    @property
    def demand_B(self) -> Floats:
        """Rows a second that the consumer would take if it never waited."""
        demand_B: Floats = self.rows_per_s_B / (1 - np.minimum(self.stall_B, MAX_STALL))
        return demand_B

    @property
    def free_bytes_B(self) -> Floats:
        """What the workers of all stages together may hold."""
        return self.limit_bytes_B - self.base_bytes_B

    def __len__(self) -> int:
        return int(self.workers_BS.shape[0])


def changed_conditions(before: Measured, now: Measured, *, tolerance: float = 0.2) -> Bools:
    """Where something outside of the pipeline changed: cores, the memory limit, a service time, the consumer."""

    def moved(old: Floats, new: Floats) -> Bools:
        found: Bools = np.abs(new - old) > tolerance * np.maximum(np.abs(old), 1e-12)
        return found

    # Workers that came or went move service times and the trainer by themselves.
    resized_B = np.abs(now.workers_BS - before.workers_BS).sum(axis=1)
    is_still = resized_B <= 0.1 * before.workers_BS.sum(axis=1)
    slower_BS = moved(before.seconds_BS, now.seconds_BS) & (now.seconds_BS * now.rows_per_s_B[:, None] > 0.05)
    is_hungry = (before.stall_B > 0.05) | (now.stall_B > 0.05)  # then demand is a guess
    consumer_B = moved(before.demand_B, now.demand_B) & ~is_hungry
    limits_B = moved(before.cores_B, now.cores_B) | moved(before.limit_bytes_B, now.limit_bytes_B)
    found_B: Bools = limits_B | (is_still & (consumer_B | slower_BS.any(axis=1)))
    return found_B


def select(chosen: Bools, new: Measured, old: Measured) -> Measured:
    """The figures of `new` where chosen, of `old` elsewhere."""
    found = {}
    for field in fields(old):
        value, kept = getattr(new, field.name), getattr(old, field.name)
        found[field.name] = np.where(chosen.reshape(-1, *[1] * (kept.ndim - 1)), value, kept)
    return Measured(**found)
