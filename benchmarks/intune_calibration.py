"""Fits the simulator to a real dataset on a real machine and measures its error on held-out points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from recmill.artifacts import Dataset, InputError
from recmill.artifacts.allocation import StageTime
from recmill.data.ingest.reader import STAGES
from recmill.tuning.measurement import Floats
from recmill.tuning.simulation.simulator import World, steady_rate
from recmill.tuning.simulation.stage_times import WARM_UP_S, measure_throughput

MAX_ERROR = 0.15
NUM_ROUNDS = 3
# Allocations and the delay of a read: single stages, too many threads, and slow reads. The second of every three points
# is held out and lies between others: the simulator must interpolate, not extrapolate.
POINTS: tuple[tuple[tuple[int, ...], float], ...] = (
    ((1, 1, 1, 1), 0.0),
    ((1, 2, 1, 1), 0.0),
    ((2, 4, 2, 2), 0.0),
    ((4, 8, 4, 2), 0.0),
    ((1, 2, 2, 1), 0.0),
    ((1, 2, 1, 1), 0.05),
    ((4, 2, 1, 1), 0.05),
    ((2, 2, 1, 1), 0.05),
    ((8, 2, 1, 1), 0.05),
    ((16, 2, 2, 1), 0.05),
)


@dataclass(frozen=True, kw_only=True)
class CalibrationPoint:
    """One measured allocation and what the fitted simulator predicts for it."""

    workers: tuple[int, ...]
    read_delay_s: float
    rows_per_s: float
    predicted: float = 0.0
    is_held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted figures of the simulator, with what the stages take."""

    scale: float  # of all times: what the stages take in a running pipeline over what they take alone
    sigma: float
    contention: float
    overhead: float
    error: float  # mean relative error on points that the fit did not see
    points: tuple[CalibrationPoint, ...]
    seconds: tuple[float, ...]  # per row, by stage
    cpu_shares: tuple[float, ...]
    rows_per_item: float
    cores: float

    def check(self) -> None:
        """Raise if the simulator is not accurate enough."""
        if not self.error <= MAX_ERROR:
            raise InputError(
                f"the simulator misses held-out measurements by {self.error:.0%}, expected at most {MAX_ERROR:.0%}: "
                "measure again on an idle machine"
            )


def calibrate(
    dataset: Dataset,
    times: Mapping[str, StageTime],
    *,
    cores: float,
    batch_size: int,
    memory_limit_bytes: int,
    measure_s: float,
) -> Calibration:
    """Measure allocations on the real pipeline, fit the simulator to some and test it on the others.

    Other work on the machine can slow a point down, or let queues fill that then drain in a burst: each point is
    measured NUM_ROUNDS times, spread over time, and the median counts.
    """
    rates: list[list[float]] = [[] for _ in POINTS]
    for done in range(NUM_ROUNDS * len(POINTS)):
        workers, delay_s = POINTS[done % len(POINTS)]
        measured_once = measure_throughput(
            dataset,
            workers=dict(zip(STAGES, workers, strict=True)),
            batch_size=batch_size,
            memory_limit_bytes=memory_limit_bytes,
            measure_s=measure_s / NUM_ROUNDS,
            warm_up_s=WARM_UP_S + 2 * delay_s,
            delays_s={"read": delay_s},
        )
        rates[done % len(POINTS)].append(measured_once.rows_per_s)
    measured = [
        CalibrationPoint(workers=workers, read_delay_s=delay_s, rows_per_s=statistics.median(found))
        for (workers, delay_s), found in zip(POINTS, rates, strict=True)
    ]
    return fit(measured, times, cores=cores)


def fit(points: Sequence[CalibrationPoint], times: Mapping[str, StageTime], *, cores: float) -> Calibration:
    """Fit to two of every three points and test on the third."""
    rows = max(1.0, times["read"].rows)
    seconds = np.array([times[stage].seconds / rows for stage in STAGES])
    shares = np.array([min(1.0, times[stage].cpu_seconds / max(times[stage].seconds, 1e-12)) for stage in STAGES])
    is_held_out = np.array([index % 3 == 1 for index in range(len(points))])
    rates = np.array([point.rows_per_s for point in points])

    def predict(parameters: Floats) -> Floats:
        return steady_rate(_world(points, seconds, shares, rows, cores, parameters), _workers(points))

    def residuals(parameters: Floats) -> Floats:
        found: Floats = np.log(predict(parameters)[~is_held_out] / rates[~is_held_out])
        return found

    # Scale, sigma, contention, overhead; one pipeline does not determine the cost of pairs of workers.
    bounds = ([0.5, 0.0, 0.0, 0.0], [4.0, 0.2, 3.0, 2.0])
    found = least_squares(residuals, x0=[1.1, 0.01, 0.2, 0.1], bounds=bounds, loss="soft_l1", f_scale=0.1)
    predicted = predict(found.x)
    error = float(np.mean(np.abs(predicted - rates)[is_held_out] / rates[is_held_out]))
    scale, sigma, contention, overhead = (float(value) for value in found.x)
    return Calibration(
        seconds=tuple(float(value) for value in seconds * scale),
        cpu_shares=tuple(float(value) for value in shares),
        rows_per_item=rows,
        cores=cores,
        sigma=sigma,
        contention=contention,
        overhead=overhead,
        scale=scale,
        error=error,
        points=tuple(
            replace(point, predicted=float(rate), is_held_out=bool(held_out))
            for point, rate, held_out in zip(points, predicted, is_held_out, strict=True)
        ),
    )


def _workers(points: Sequence[CalibrationPoint]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([point.workers for point in points], dtype=np.int64)


def _world(
    points: Sequence[CalibrationPoint], seconds: Floats, shares: Floats, rows: float, cores: float, parameters: Floats
) -> World:
    """One world per point: the same machine with delayed reads."""
    size, (scale, sigma, contention, overhead) = len(points), parameters
    seconds_BS = np.tile(seconds * scale, (size, 1))
    cpu_BS = seconds_BS * shares
    seconds_BS[:, 0] += [point.read_delay_s / rows for point in points]
    one = np.ones(size)
    sigma_BS = np.full_like(seconds_BS, sigma)
    sigma_BS[:, 0] = 0.0  # reads of different row groups share nothing
    return World(
        seconds_BS=seconds_BS,
        cpu_share_BS=cpu_BS / seconds_BS,
        sigma_BS=sigma_BS,
        kappa_BS=np.zeros_like(seconds_BS),
        contention_B=contention * one,
        overhead_B=overhead * one,
        cores_B=cores * one,
        slots_B=np.full(size, 10**6),
        trainer_B=1e12 * one,
        trainer_slowing_B=0 * one,
        trainer_knee_B=one,
        item_bytes_BS=np.zeros_like(seconds_BS),
        base_bytes_B=0 * one,
        limit_bytes_B=1e18 * one,
    )
