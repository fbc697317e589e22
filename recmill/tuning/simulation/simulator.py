"""A model of many ingestion pipelines at once: the rate of B allocations, without a machine.

A stage with w workers processes w rows in `seconds`, slowed by the universal scalability law for workers of the same
stage. Every stage slows down as all of them load the memory system, threads beyond the cores cost time, the cores limit
the total, and the trainer slows down as the cores fill up. Shape suffixes: B = pipelines, S = stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Bools, Floats, Ints, Limits, Measured

LAG = 0.15  # weight of the last interval's rate: queues fill and drain
MIN_TRAINER_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class World(Limits):
    """B machines with their stages and trainers."""

    seconds_BS: Floats  # per row, for a single worker
    cpu_share_BS: Floats  # share of these seconds on a core
    sigma_BS: Floats  # universal scalability law: share of the work that is serial within a stage
    kappa_BS: Floats  # and the cost of each pair of workers
    contention_B: Floats  # slowdown of all stages at full load
    overhead_B: Floats  # slowdown per multiple of the cores in threads that need one
    trainer_B: Floats  # rows per second with idle cores
    trainer_slowing_B: Floats  # share of its rate that the trainer loses when ingestion uses all cores
    trainer_knee_B: Floats  # load above which it slows down


@dataclass(frozen=True, kw_only=True, eq=False)
class Event:
    """A change at interval `step_B` (after the end: never): factors on the world's figures."""

    step_B: Ints
    cores_B: Floats
    read_seconds_B: Floats
    trainer_B: Floats
    memory_B: Floats

    @classmethod
    def none(cls, size: int) -> Event:
        one = np.ones(size)
        return cls(step_B=np.full(size, 10**9), cores_B=one, read_seconds_B=one, trainer_B=one, memory_B=one)

    def applied(self, world: World, chosen: Bools) -> World:
        """The world after the event, where `chosen`."""

        def factor(value: Floats) -> Floats:
            return np.where(chosen, value, 1.0)

        seconds_BS, share_BS = world.seconds_BS.copy(), world.cpu_share_BS.copy()
        # With slower storage the waiting time grows, the CPU time does not.
        slower = factor(self.read_seconds_B)
        seconds_BS[:, 0] *= slower
        share_BS[:, 0] /= slower
        return replace(
            world,
            seconds_BS=seconds_BS,
            cpu_share_BS=share_BS,
            cores_B=np.maximum(1.0, np.round(world.cores_B * factor(self.cores_B))),
            trainer_B=world.trainer_B * factor(self.trainer_B),
            limit_bytes_B=world.base_bytes_B + (world.limit_bytes_B - world.base_bytes_B) * factor(self.memory_B),
        )


def steady_rate(world: World, workers_BS: Ints) -> Floats:
    """Rows per second that reach the trainer in the steady state."""
    return steady_state(world, workers_BS)["rate_B"]


def steady_state(world: World, workers_BS: Ints) -> dict[str, Floats]:
    """Rates and seconds per row of each stage, in the steady state."""
    w_BS = workers_BS.astype(np.float64)
    law_BS = 1 + world.sigma_BS * (w_BS - 1) + world.kappa_BS * w_BS * (w_BS - 1)
    threads_B = (w_BS * world.cpu_share_BS).sum(axis=1)
    crowd_B = 1 + world.overhead_B * np.maximum(0, threads_B / world.cores_B - 1)
    alone_BS = world.seconds_BS * law_BS * crowd_B[:, None]
    cpu_B = (world.seconds_BS * world.cpu_share_BS).sum(axis=1) * crowd_B
    # At rate X all seconds grow by 1 + slope * X, so each limit is a quadratic in X.
    slope_B = world.contention_B * cpu_B / world.cores_B
    stage_BS = _solve(slope_B[:, None] * alone_BS, alone_BS, w_BS)
    core_B = _solve(slope_B * cpu_B, cpu_B, world.cores_B)
    ingest_B = np.minimum(stage_BS.min(axis=1), core_B)
    filled_B = np.clip(threads_B / world.cores_B - world.trainer_knee_B, 0, None)
    trainer_B = world.trainer_B * np.maximum(MIN_TRAINER_SHARE, 1 - world.trainer_slowing_B * filled_B)
    rate_B = np.minimum(ingest_B, trainer_B)
    swell_BS = (1 + slope_B * rate_B)[:, None]
    return {
        "rate_B": rate_B,
        "ingest_B": ingest_B,
        "trainer_B": trainer_B,
        "seconds_BS": alone_BS * swell_BS,
        "cpu_BS": world.seconds_BS * world.cpu_share_BS * crowd_B[:, None] * swell_BS,
        "stage_BS": stage_BS,
    }


def _solve(square: Floats, linear: Floats, constant: Floats) -> Floats:
    """The positive root of square * X**2 + linear * X = constant."""
    return 2 * constant / (linear + np.sqrt(linear**2 + 4 * square * constant))


class Simulator:
    """Steps B worlds through intervals with the workers that a controller sets.

    As in the real pipeline, bytes are charged at admission: workers beyond the limit get no work.
    """

    def __init__(self, world: World, *, event: Event | None = None, seed: int = 0, noise: float = 0.03) -> None:
        self.start, self.event, self.noise = world, event or Event.none(len(world)), noise
        self._rng = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> Measured:
        size = len(self.start)
        self.world, self.step_B = self.start, np.zeros(size, dtype=np.int64)
        self.workers_BS = np.ones_like(self.start.seconds_BS, dtype=np.int64)
        self.rate_B = np.zeros(size)
        return self.step(self.workers_BS)

    def step(self, workers_BS: Ints) -> Measured:
        """One interval with these workers."""
        held_B = self.begin(workers_BS)
        return self.run(clip_workers(workers_BS, self.world)[0], np.minimum(held_B, self.world.limit_bytes_B))

    def begin(self, workers_BS: Ints) -> Floats:
        """Let the event happen, if it is time; returns the bytes that these workers want."""
        is_event = self.step_B == self.event.step_B
        if is_event.any():
            self.world = self.event.applied(self.world, is_event)
        self.step_B = self.step_B + 1
        use_BS = self.world.item_bytes_BS * self._rng.uniform(0.6, 1.0, self.world.item_bytes_BS.shape)
        held_B: Floats = self.world.base_bytes_B + (np.maximum(1, workers_BS) * use_BS).sum(axis=1)
        return held_B

    def run(self, workers_BS: Ints, held_B: Floats) -> Measured:
        """Measure an interval in which these workers hold these bytes."""
        self.workers_BS, state = workers_BS, steady_state(self.world, workers_BS)
        settled_B = np.where(self.rate_B > 0, LAG * self.rate_B + (1 - LAG) * state["rate_B"], state["rate_B"])
        self.rate_B = np.minimum(settled_B, state["rate_B"])

        def blurred(values: Floats) -> Floats:
            return values * np.exp(self._rng.normal(0, self.noise, values.shape))

        stall_B = np.clip(1 - state["ingest_B"] / state["trainer_B"], 0, 1)
        # The queue before a stage that is slower than its predecessor is full, the queue after it is empty.
        before_BS = np.concatenate([state["stage_BS"][:, :1], state["stage_BS"][:, :-1]], axis=1)
        # Both are means over an interval of many items.
        seconds_BS = blurred(state["seconds_BS"])
        return Measured(
            **{field.name: getattr(self.world, field.name) for field in fields(Limits)},
            workers_BS=workers_BS,
            seconds_BS=seconds_BS,
            cpu_BS=np.minimum(seconds_BS, blurred(state["cpu_BS"])),
            queue_BS=np.clip(0.5 + 2 * (before_BS / state["stage_BS"] - 1), 0, 1),
            rows_per_s_B=blurred(self.rate_B),
            stall_B=np.clip(stall_B + self._rng.normal(0, self.noise / 3, stall_B.shape), 0, 1) * (stall_B > 0),
            memory_bytes_B=held_B,
        )
