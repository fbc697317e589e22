"""The input of a controller: measurements of the last interval, of a simulated or a real pipeline.

Shape suffixes: B = pipelines (1 if real, many in simulation), S = stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TOLERANCE = 0.2  # smaller relative changes are noise
MAX_STALL = 0.98  # a consumer that waits more than this does not show how fast it could be


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """What the workers of B pipelines may use."""

    cores_B: Floats  # cores that ingestion may use
    slots_B: Ints  # maximum number of workers of all stages together
    item_bytes_BS: Floats  # maximum bytes per worker of the stage
    base_bytes_B: Floats  # independent of the workers: one batch and its row groups
    limit_bytes_B: Floats

    @property
    def free_bytes_B(self) -> Floats:
        """Bytes available to the workers of all stages together."""
        return self.limit_bytes_B - self.base_bytes_B

    def __len__(self) -> int:
        return len(self.cores_B)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(Limits):
    """One interval of B pipelines."""

    workers_BS: Ints
    seconds_BS: Floats  # seconds per row of a worker, without the time it waits for a core
    cpu_BS: Floats  # seconds of these on a core
    queue_BS: Floats  # how full the queue before each stage is, 0 to 1
    rows_per_s_B: Floats  # rate of the consumer
    stall_B: Floats  # share of the time that the consumer waited
    memory_bytes_B: Floats  # current use

    @property
    def demand_B(self) -> Floats:
        """Rows per second that the consumer would take if it never waited."""
        demand_B: Floats = self.rows_per_s_B / (1 - np.minimum(self.stall_B, MAX_STALL))
        return demand_B


def changed_conditions(before: Measured, now: Measured) -> Bools:
    """Where something outside the pipeline changed: cores, the memory limit, a service time, the consumer."""

    def moved(old: Floats, new: Floats) -> Bools:
        found: Bools = np.abs(new - old) > TOLERANCE * np.maximum(np.abs(old), 1e-12)
        return found

    # Adding or removing workers changes service times and the trainer's rate as well.
    resized_B = np.abs(now.workers_BS - before.workers_BS).sum(axis=1)
    is_still = resized_B <= 0.1 * before.workers_BS.sum(axis=1)
    slower_BS = moved(before.seconds_BS, now.seconds_BS) & (now.seconds_BS * now.rows_per_s_B[:, None] > 0.05)
    is_hungry = (before.stall_B > 0.05) | (now.stall_B > 0.05)  # then the demand is unknown
    consumer_B = moved(before.demand_B, now.demand_B) & ~is_hungry
    limits_B = moved(before.cores_B, now.cores_B) | moved(before.limit_bytes_B, now.limit_bytes_B)
    found_B: Bools = limits_B | (is_still & (consumer_B | slower_BS.any(axis=1)))
    return found_B
