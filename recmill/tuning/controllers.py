"""Controllers that choose the number of workers per stage, behind one interface.

A controller sees the measurements of the last interval of B pipelines and proposes the workers of each stage for the
next. The guard (`clip_workers`) limits every proposal, except for controllers that show what happens without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Bools, Floats, Ints, Measured, changed_conditions, pick
from recmill.tuning.programme import solve_workers

SMOOTHING = 0.4  # weight of the newest interval in a profile; 1 after a change of conditions
DEMAND_HEADROOM = 1.05  # a little more than the trainer takes, so that it never waits
READ = 0  # the stage that waits for storage
FORGETTING = 0.995  # decay of the highest CPU share per interval, to detect a stage that begins to wait for a service


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

    def __init__(self, *, is_guarded: bool = True, believed_bytes: float = 4.0) -> None:
        """`believed_bytes`: the memory that it assumes, as a multiple of the real limit."""
        self.is_guarded, self._believed = is_guarded, believed_bytes
        self.name = "AUTOTUNE-like, guarded" if is_guarded else "AUTOTUNE-like"

    def reset(self, measured: Measured) -> None:
        self._buffer_B = measured.base_bytes_B / 4
        self._ram_B = 0.5 * self._believed * measured.limit_bytes_B

    def propose(self, measured: Measured) -> Ints:
        wanted_BS = measured.workers_BS.copy()
        rows = np.arange(len(measured))
        for _ in range(max(1, int(measured.cores_B.max()) // 8)):
            slowest_B = np.argmin(wanted_BS / measured.seconds_BS, axis=1)
            has_room = (wanted_BS.sum(axis=1) < measured.cores_B) & (measured.stall_B > 0)
            wanted_BS[rows[has_room], slowest_B[has_room]] += 1
        grows = (measured.stall_B > 0) & ~measured.failed_B
        used_B = measured.base_bytes_B + (wanted_BS * measured.item_bytes_BS).sum(axis=1)
        self._buffer_B = np.where(grows, np.minimum(2 * self._buffer_B, self._ram_B - used_B), self._buffer_B)
        self._buffer_B = np.where(measured.failed_B, measured.base_bytes_B / 4, np.maximum(0, self._buffer_B))
        return wanted_BS

    def buffer_bytes(self, measured: Measured) -> Floats:
        return np.zeros(len(measured)) if self.is_guarded else self._buffer_B


class Profile:
    """Service times smoothed over intervals, reset when conditions change."""

    def reset(self, measured: Measured) -> None:
        self.seconds_BS, self.cpu_BS = measured.seconds_BS, measured.cpu_BS
        self.core_share_BS = _cpu_share(measured)
        self._last = measured
        self.is_new_B: Bools = np.ones(len(measured), dtype=np.bool_)

    def update(self, measured: Measured) -> None:
        self.is_new_B = changed_conditions(self._last, measured)
        weight_B1 = np.where(self.is_new_B, 1.0, SMOOTHING)[:, None]
        self.seconds_BS = weight_B1 * measured.seconds_BS + (1 - weight_B1) * self.seconds_BS
        self.cpu_BS = weight_B1 * measured.cpu_BS + (1 - weight_B1) * self.cpu_BS
        self._update_share(measured)
        self._last = measured

    def _update_share(self, measured: Measured) -> None:
        """The share of a worker's time in which it uses or needs a core.

        Workers that wait for each other, or for the GIL, look like workers that wait for storage: less CPU time per
        second. But more of them would only wait longer. So the highest share seen counts; for reading, which does wait
        for storage, the current share counts.
        """
        share_BS = _cpu_share(measured)
        kept_BS = FORGETTING * self.core_share_BS
        kept_BS[:, READ] = 0.0
        self.core_share_BS = np.maximum(share_BS, kept_BS)

    def replace(self, chosen: Bools, fresh: Profile) -> None:
        """Copy the chosen pipelines from another profile."""
        self.seconds_BS = np.where(chosen[:, None], fresh.seconds_BS, self.seconds_BS)
        self.cpu_BS = np.where(chosen[:, None], fresh.cpu_BS, self.cpu_BS)
        self.core_share_BS = np.where(chosen[:, None], fresh.core_share_BS, self.core_share_BS)
        self.is_new_B = np.where(chosen, fresh.is_new_B, self.is_new_B)
        self._last = pick(chosen, fresh._last, self._last)


def _cpu_share(measured: Measured) -> Floats:
    share_BS: Floats = np.clip(measured.cpu_BS / np.maximum(measured.seconds_BS, 1e-12), 0.0, 1.0)
    return share_BS


class LinearProgramme(Controller):
    """The linear programme's answer for the initial (`once`) or current service times, for the highest possible rate
    or, with `to_demand`, for slightly more than the trainer needs."""

    def __init__(self, *, once: bool = False, to_demand: bool = False) -> None:
        self.once, self.to_demand = once, to_demand
        self.name = "LP once" if once else "LP to demand" if to_demand else "LP re-profiled"

    def reset(self, measured: Measured) -> None:
        self._profile = Profile()
        self._profile.reset(measured)
        self._first_BS: Ints | None = None

    def propose(self, measured: Measured) -> Ints:
        if self.once:
            if self._first_BS is None:
                self._first_BS, _ = solve_workers(measured.seconds_BS, measured.cpu_BS, measured)
            return self._first_BS
        self._profile.update(measured)
        demand_B = DEMAND_HEADROOM * measured.demand_B if self.to_demand else None
        return solve_workers(self._profile.seconds_BS, self._profile.cpu_BS, measured, demand_B=demand_B)[0]


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
    ]
