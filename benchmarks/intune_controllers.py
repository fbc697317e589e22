"""Controllers that the agent is compared with, behind one interface, and machines that they can run out of memory.

A controller sees the measurements of the last interval of B pipelines and proposes the workers of each stage for the
next. The guard (`clip_workers`) limits every proposal, except for controllers that show what happens without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recmill.tuning.agent import Agent
from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Bools, Floats, Ints, Measured
from recmill.tuning.programme import solve_workers
from recmill.tuning.residual import Profile, Watcher
from recmill.tuning.simulation.simulator import Simulator, World

DEMAND_HEADROOM = 1.05  # a little more than the trainer takes, so that it never waits
RESTART_INTERVALS = 3  # lost after an out-of-memory kill


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredWithKills(Measured):
    failed_B: Bools  # ran out of memory in this interval


class Machines(Simulator):
    """The simulator with and without credits.

    Without, exceeding the limit kills the pipeline, which restarts with one worker per stage.
    """

    def __init__(self, world: World, *, has_credits: bool, **options: Any) -> None:
        self.has_credits = has_credits
        super().__init__(world, **options)

    def reset(self) -> Measured:
        self.down_B = np.zeros(len(self.start), dtype=np.int64)
        self.num_failures_B = np.zeros(len(self.start), dtype=np.int64)
        return super().reset()

    def step(self, workers_BS: Ints, *, buffer_bytes_B: Floats | float = 0.0) -> Measured:
        if self.has_credits:
            return _with_kills(super().step(workers_BS), np.zeros(len(self.world), dtype=np.bool_))
        held_B = self.begin(workers_BS) + buffer_bytes_B
        failed_B = (held_B > self.world.limit_bytes_B) & (self.down_B == 0)
        self.num_failures_B = self.num_failures_B + failed_B
        self.down_B = np.where(failed_B, RESTART_INTERVALS, np.maximum(0, self.down_B - 1))
        is_down = self.down_B > 0
        measured = self.run(np.where(is_down[:, None], 1, np.maximum(1, workers_BS)), held_B)
        self.rate_B = np.where(is_down, 0.0, self.rate_B)
        rate_B, stall_B = np.where(is_down, 0.0, measured.rows_per_s_B), np.where(is_down, 1.0, measured.stall_B)
        return _with_kills(replace(measured, rows_per_s_B=rate_B, stall_B=stall_B), failed_B)


def _with_kills(measured: Measured, failed_B: Bools) -> MeasuredWithKills:
    return MeasuredWithKills(**vars(measured), failed_B=failed_B)


class Controller(ABC):
    """Decides for B pipelines at once. Call `reset` before the first decision; reports show `name`."""

    name: str
    is_guarded = True

    def reset(self, measured: Measured) -> None:  # noqa: B027 - some have no state
        """Start a new run with these measurements."""

    @abstractmethod
    def propose(self, measured: Measured) -> Ints:
        """The proposed workers, [B, S]."""

    def decide(self, measured: Measured) -> Ints:
        """The workers after the guard, [B, S]."""
        wanted_BS = self.propose(measured)
        return clip_workers(wanted_BS, measured)[0] if self.is_guarded else np.maximum(1, wanted_BS)

    def buffer_bytes(self, measured: Measured) -> Floats:
        """Additional bytes that waiting batches may take."""
        return np.zeros(len(measured))


class TunedByAgent(Controller):
    """The agent of the package."""

    name = "agent"

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def reset(self, measured: Measured) -> None:
        self._agent.reset(measured)

    def propose(self, measured: Measured) -> Ints:
        return self._agent.decide(measured)


class EvenSplit(Controller):
    """The same number of workers for every stage, as many as cores in total."""

    name = "even split"

    def propose(self, measured: Measured) -> Ints:
        num_stages = measured.workers_BS.shape[1]
        each_B = np.maximum(1, measured.cores_B.astype(np.int64) // num_stages)
        return np.repeat(each_B[:, None], num_stages, axis=1)


class HillClimbing(Controller):
    """Adds one worker to the slowest stage and removes it again unless the rate rises by 1%."""

    name = "hill climbing"

    def reset(self, measured: Measured) -> None:
        self._kept_BS = measured.workers_BS.copy()
        self._kept_rate_B = measured.rows_per_s_B.copy()
        self._is_trying = np.zeros(len(measured), dtype=np.bool_)
        self._refused_BS = np.zeros_like(measured.workers_BS)

    def propose(self, measured: Measured) -> Ints:
        is_better = measured.rows_per_s_B > 1.01 * self._kept_rate_B
        tried_stage_B = np.argmax(measured.workers_BS - self._kept_BS, axis=1)
        is_refused = self._is_trying & ~is_better
        rows = np.arange(len(measured))
        self._refused_BS[rows[is_refused], tried_stage_B[is_refused]] += 1
        accepts = is_better | ~self._is_trying
        self._kept_BS = np.where(accepts[:, None], measured.workers_BS, self._kept_BS)
        # Use the current rate even if it fell: conditions change.
        self._kept_rate_B = np.where(accepts, measured.rows_per_s_B, self._kept_rate_B)
        speed_BS = self._kept_BS / measured.seconds_BS * (1 + self._refused_BS)
        wanted_BS = self._kept_BS.copy()
        has_room = wanted_BS.sum(axis=1) < measured.cores_B
        grows = has_room & ~is_refused
        wanted_BS[rows[grows], np.argmin(speed_BS, axis=1)[grows]] += 1
        self._is_trying = grows
        return wanted_BS


class Autotune(Controller):
    """Adds workers to the stage whose modelled time falls most, and buffers while the trainer waits.

    As in tf.data, its memory budget is half of the machine's memory, not the limit of the process.
    """

    believed = 4.0  # the memory that it assumes, as a multiple of the real limit

    def __init__(self, *, is_guarded: bool) -> None:
        self.is_guarded = is_guarded
        self.name = "AUTOTUNE-like, guarded" if is_guarded else "AUTOTUNE-like"

    def reset(self, measured: Measured) -> None:
        self._buffer_B = measured.base_bytes_B / 4
        self._ram_B = 0.5 * self.believed * measured.limit_bytes_B

    def propose(self, measured: Measured) -> Ints:
        wanted_BS = measured.workers_BS.copy()
        rows = np.arange(len(measured))
        for _ in range(max(1, int(measured.cores_B.max()) // 8)):
            slowest_B = np.argmin(wanted_BS / measured.seconds_BS, axis=1)
            has_room = (wanted_BS.sum(axis=1) < measured.cores_B) & (measured.stall_B > 0)
            wanted_BS[rows[has_room], slowest_B[has_room]] += 1
        assert isinstance(measured, MeasuredWithKills)
        grows = (measured.stall_B > 0) & ~measured.failed_B
        used_B = measured.base_bytes_B + (wanted_BS * measured.item_bytes_BS).sum(axis=1)
        self._buffer_B = np.where(grows, np.minimum(2 * self._buffer_B, self._ram_B - used_B), self._buffer_B)
        self._buffer_B = np.where(measured.failed_B, measured.base_bytes_B / 4, np.maximum(0, self._buffer_B))
        return wanted_BS

    def buffer_bytes(self, measured: Measured) -> Floats:
        return np.zeros(len(measured)) if self.is_guarded else self._buffer_B


class LinearProgramme(Controller):
    """The linear programme's answer for the initial (`once`) or current service times, for the highest possible rate
    or, with `to_demand`, for slightly more than the trainer needs."""

    def __init__(self, *, once: bool = False, to_demand: bool = False) -> None:
        self.once, self.to_demand = once, to_demand
        self.name = "LP once" if once else "LP to demand" if to_demand else "LP re-profiled"

    def reset(self, measured: Measured) -> None:
        self._profile = Profile(measured)
        self._first_BS: Ints | None = None

    def propose(self, measured: Measured) -> Ints:
        if self.once:
            if self._first_BS is None:
                self._first_BS, _ = solve_workers(measured.seconds_BS, measured.cpu_BS, measured)
            return self._first_BS
        self._profile.update(measured)
        demand_B = DEMAND_HEADROOM * measured.demand_B if self.to_demand else None
        return solve_workers(self._profile.seconds_BS, self._profile.cpu_BS, measured, demand_B=demand_B)[0]


class BoundedProgramme(Controller):
    """The programme that the agent corrects, alone: a little above the demand, few more runnable threads than cores."""

    name = "bounded LP"

    def reset(self, measured: Measured) -> None:
        self._watcher = Watcher(measured)

    def propose(self, measured: Measured) -> Ints:
        self._watcher.update(measured)
        return self._watcher.programme_BS


def baselines() -> list[Controller]:
    """All controllers that do not learn."""
    return [
        EvenSplit(),
        HillClimbing(),
        Autotune(is_guarded=False),
        Autotune(is_guarded=True),
        LinearProgramme(once=True),
        LinearProgramme(),
        LinearProgramme(to_demand=True),
        BoundedProgramme(),
    ]
