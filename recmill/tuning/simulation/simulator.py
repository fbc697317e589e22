"""A model of many ingestion pipelines at once: the rate of B allocations, without a machine.

A stage with w workers processes w rows in `seconds`, slowed by the universal scalability law for workers of the same
stage. Every stage slows down as all of them load the memory system, threads beyond the cores cost time, the cores limit
the total, and the trainer slows down as the cores fill up. Shape suffixes: B = pipelines, S = stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Bools, Floats, Ints, Measured, pick

RESTART_INTERVALS = 3  # lost after an out-of-memory kill
LAG = 0.15  # weight of the last interval's rate: queues fill and drain
MIN_TRAINER_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """B machines with their stages and trainers."""

    seconds_BS: Floats  # per row, for a single worker
    cpu_share_BS: Floats  # share of these seconds on a core
    sigma_BS: Floats  # universal scalability law: share of the work that is serial within a stage
    kappa_BS: Floats  # and the cost of each pair of workers
    contention_B: Floats  # slowdown of all stages at full load
    overhead_B: Floats  # slowdown per multiple of the cores in threads that need one
    cores_B: Floats
    slots_B: Ints
    trainer_B: Floats  # rows per second with idle cores
    trainer_slowing_B: Floats  # share of its rate that the trainer loses when ingestion uses all cores
    trainer_knee_B: Floats  # load above which it slows down
    item_bytes_BS: Floats
    base_bytes_B: Floats
    limit_bytes_B: Floats

    def __len__(self) -> int:
        return int(self.cores_B.shape[0])

    def take(self, chosen: Ints | Bools) -> World:
        """Some of the machines."""
        return World(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


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

    With `has_credits`, as in the real pipeline, bytes are charged at admission: workers beyond the limit get no work.
    Without, exceeding the limit kills the pipeline, which restarts with one worker per stage.
    """

    def __init__(
        self, world: World, *, event: Event | None = None, seed: int = 0, noise: float = 0.03, has_credits: bool = True
    ) -> None:
        self.start, self.event = world, event or Event.none(len(world))
        self.noise, self.has_credits = noise, has_credits
        self._rng = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> Measured:
        size = len(self.start)
        self.world, self.step_B = self.start, np.zeros(size, dtype=np.int64)
        self.workers_BS = np.ones_like(self.start.seconds_BS, dtype=np.int64)
        self.down_B = np.zeros(size, dtype=np.int64)
        self.num_failures_B = np.zeros(size, dtype=np.int64)
        self.rate_B = np.zeros(size)
        return self.step(self.workers_BS)

    def restart(self, chosen: Bools, world: World, event: Event) -> None:
        """Replace the chosen worlds."""
        self.start = pick(chosen, world, self.start)
        self.world = pick(chosen, world, self.world)
        self.event = pick(chosen, event, self.event)
        for array, value in ((self.step_B, 0), (self.down_B, 0), (self.rate_B, 0.0)):
            array[chosen] = value
        self.workers_BS[chosen] = 1

    def measure_first(self, chosen: Bools, measured: Measured) -> Measured:
        """Measurements of the chosen worlds with one worker per stage; those of the others unchanged."""
        state = steady_state(self.world, self.workers_BS)
        self.rate_B = np.where(chosen, state["rate_B"], self.rate_B)
        is_up = np.zeros(len(self.world), dtype=np.bool_)
        held_B = self.world.base_bytes_B + self.world.item_bytes_BS.sum(axis=1)
        return pick(chosen, self._measure(state, held_B, is_up, is_up), measured)

    def step(self, workers_BS: Ints, *, buffer_bytes_B: Floats | None = None) -> Measured:
        """One interval with these workers."""
        is_event = self.step_B == self.event.step_B
        if is_event.any():
            self.world = self.event.applied(self.world, is_event)
        self.step_B = self.step_B + 1
        world, rng = self.world, self._rng
        wanted_BS = np.maximum(1, workers_BS)
        use_BS = world.item_bytes_BS * rng.uniform(0.6, 1.0, world.item_bytes_BS.shape)
        held_B = world.base_bytes_B + (wanted_BS * use_BS).sum(axis=1)
        if buffer_bytes_B is not None:
            held_B = held_B + buffer_bytes_B
        failed_B = np.zeros(len(world), dtype=np.bool_)
        active_BS = wanted_BS
        if self.has_credits:
            active_BS, _ = clip_workers(wanted_BS, self.limits())
            held_B = np.minimum(held_B, world.limit_bytes_B)
        else:
            failed_B = (held_B > world.limit_bytes_B) & (self.down_B == 0)
        self.num_failures_B = self.num_failures_B + failed_B
        self.down_B = np.where(failed_B, RESTART_INTERVALS, np.maximum(0, self.down_B - 1))
        is_down = self.down_B > 0
        self.workers_BS = np.where(is_down[:, None], 1, active_BS)
        state = steady_state(world, self.workers_BS)
        settled = np.where(self.rate_B > 0, LAG * self.rate_B + (1 - LAG) * state["rate_B"], state["rate_B"])
        self.rate_B = np.where(is_down, 0.0, np.minimum(settled, state["rate_B"]))
        return self._measure(state, held_B, failed_B, is_down)

    def limits(self) -> Measured:
        """The limits of the worlds, without measurements."""
        world, size = self.world, len(self.world)
        zero_B, zero_BS = np.zeros(size), np.zeros_like(world.seconds_BS)
        return Measured(
            workers_BS=self.workers_BS,
            seconds_BS=zero_BS,
            cpu_BS=zero_BS,
            queue_BS=zero_BS,
            rows_per_s_B=zero_B,
            stall_B=zero_B,
            cores_B=world.cores_B,
            slots_B=world.slots_B,
            item_bytes_BS=world.item_bytes_BS,
            base_bytes_B=world.base_bytes_B,
            memory_bytes_B=zero_B,
            limit_bytes_B=world.limit_bytes_B,
            failed_B=zero_B > 0,
        )

    def _measure(self, state: Mapping[str, Floats], held_B: Floats, failed_B: Bools, is_down: Bools) -> Measured:
        def blurred(values: Floats) -> Floats:
            return values * np.exp(self._rng.normal(0, self.noise, values.shape))

        ratio_B = state["ingest_B"] / state["trainer_B"]
        stall_B = np.where(is_down, 1.0, np.clip(1 - ratio_B, 0, 1))
        # The queue before a stage that is slower than its predecessor is full, the queue after it is empty.
        before_BS = np.concatenate([state["stage_BS"][:, :1], state["stage_BS"][:, :-1]], axis=1)
        queue_BS = np.clip(0.5 + 2 * (before_BS / state["stage_BS"] - 1), 0, 1)
        # Both are means over an interval of many items.
        seconds_BS = blurred(state["seconds_BS"])
        return replace(
            self.limits(),
            seconds_BS=seconds_BS,
            cpu_BS=np.minimum(seconds_BS, blurred(state["cpu_BS"])),
            queue_BS=queue_BS,
            rows_per_s_B=blurred(self.rate_B),
            stall_B=np.clip(stall_B + self._rng.normal(0, self.noise / 3, stall_B.shape), 0, 1) * (stall_B > 0),
            memory_bytes_B=held_B,
            failed_B=failed_B,
        )


def best_workers(world: World, *, num_levels: int = 80, num_rounds: int = 12) -> tuple[Ints, Floats]:
    """The oracle: the workers with the highest rate, given full knowledge of the world.

    Fewer workers never slow another stage, so the best allocation has the fewest that sustain its rate: try a range of
    rates, then move single workers as long as that helps.
    """
    limits = Simulator(world, noise=0.0).limits()
    size, num_stages = world.seconds_BS.shape
    best_BS = np.ones((size, num_stages), dtype=np.int64)
    best_B = steady_rate(world, best_BS)

    def consider(tried_BS: Ints) -> None:
        nonlocal best_BS, best_B
        clipped_BS, _ = clip_workers(tried_BS, limits)
        rate_B = steady_rate(world, clipped_BS)
        is_better = rate_B > best_B * (1 + 1e-9)
        best_BS, best_B = np.where(is_better[:, None], clipped_BS, best_BS), np.maximum(best_B, rate_B)

    most_B = np.minimum(world.trainer_B, world.cores_B / (world.seconds_BS * world.cpu_share_BS).sum(axis=1))
    for level in np.linspace(1 / num_levels, 1.0, num_levels):
        consider(_workers_for(world, level * most_B))
    for _ in range(num_rounds):
        before_B = best_B
        for moves_S in _moves(num_stages):
            change_BS = np.sign(moves_S) * np.maximum(1, np.rint(best_BS * np.abs(moves_S)).astype(np.int64))
            consider(best_BS + change_BS.astype(np.int64))
        if np.array_equal(best_B, before_B):
            break
    return best_BS, best_B


def _moves(num_stages: int) -> list[Floats]:
    """Changes to try: one stage, one up and another down, or all; by a share, or by one worker (a tiny share)."""
    moves = [np.full(num_stages, share) for share in (-0.1, -0.03, 0.03, 0.1)]
    for stage in range(num_stages):
        for share in (-0.1, -0.03, -1e-9, 1e-9, 0.03, 0.1):
            alone = np.zeros(num_stages)
            alone[stage] = share
            moves.append(alone)
            for other in range(num_stages):
                if other != stage and share > 0:
                    pair = alone.copy()
                    pair[other] = -share
                    moves.append(pair)
    return moves


def _workers_for(world: World, rate_B: Floats) -> Ints:
    """The fewest workers per stage that sustain a rate, found by iterating with the slowdown they cause."""
    cpu_B = (world.seconds_BS * world.cpu_share_BS).sum(axis=1)
    w_BS = np.ones_like(world.seconds_BS)
    for _ in range(6):
        law_BS = 1 + world.sigma_BS * (w_BS - 1) + world.kappa_BS * w_BS * (w_BS - 1)
        threads_B = (w_BS * world.cpu_share_BS).sum(axis=1)
        crowd_B = 1 + world.overhead_B * np.maximum(0, threads_B / world.cores_B - 1)
        swell_B = crowd_B * (1 + world.contention_B * cpu_B * crowd_B / world.cores_B * rate_B)
        w_BS = np.clip(rate_B[:, None] * world.seconds_BS * law_BS * swell_B[:, None], 1, world.slots_B[:, None])
    return np.ceil(w_BS - 1e-9).astype(np.int64)
