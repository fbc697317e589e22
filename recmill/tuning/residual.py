"""The agent's observations and actions: corrections of the linear programme's answer.

An action has one of five choices per stage (fewer or more workers than the programme's answer) and one for how far to
go above the trainer's demand and beyond the number of cores.

Shape suffixes: B = pipelines, S = stages, A = S + 1 choices, F = figures.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Bools, Floats, Ints, Measured, changed_conditions
from recmill.tuning.programme import solve_workers

SMOOTHING = 0.4  # weight of the newest interval in a profile; 1 after a change of conditions
READ = 0  # the stage that waits for storage
FORGETTING = 0.995  # decay of the highest CPU share per interval, to detect a stage that begins to wait for a service
NUM_CHOICES = 5
NUM_STACKED = 3
FACTORS = np.array([0.7, 0.87, 1.0, 1.12, 1.3])  # of the workers of a stage
# The targets for demand and for threads that need a core, as multiples of the actual demand and cores.
HEADROOMS = np.array([np.inf, np.inf, 1.1, 1.04, 0.97])
CROWDS = np.array([np.inf, 1.25, 1.12, 1.0, 1.0])
PROGRAMME_HEADROOM, PROGRAMME_CROWD = 1.05, 1.25  # used by the programme itself
MAX_KNOWN_STALL = 0.95  # a consumer that waits longer does not show its demand
NEUTRAL = 2  # the choice that keeps the programme's answer for a stage
MOVE_COST = 0.02  # reward lost for moving as many workers as there are cores
NUM_STAGE_FIGURES = 7
NUM_COMMON_FIGURES = 8


class Profile:
    """Service times smoothed over intervals, reset when conditions change."""

    def __init__(self, measured: Measured) -> None:
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


def _cpu_share(measured: Measured) -> Floats:
    share_BS: Floats = np.clip(measured.cpu_BS / np.maximum(measured.seconds_BS, 1e-12), 0.0, 1.0)
    return share_BS


def num_figures(num_stages: int) -> int:
    return NUM_STACKED * (NUM_STAGE_FIGURES * num_stages + NUM_COMMON_FIGURES)


def correct_workers(action_BA: Ints, profile: Profile, measured: Measured) -> Ints:
    """The workers that an action requests."""
    aim_B = action_BA[:, -1]
    base_BS, _ = solve_bounded(profile, measured, headroom_B=HEADROOMS[aim_B], crowd_B=CROWDS[aim_B])
    choice_BS = action_BA[:, :-1]
    scaled_BS = np.rint(base_BS * FACTORS[choice_BS]).astype(np.int64)
    # A small number times a factor may round to itself: a request for more adds at least one.
    least_BS = base_BS + np.sign(choice_BS - NEUTRAL)
    moved_BS = np.where(choice_BS > NEUTRAL, np.maximum(scaled_BS, least_BS), np.minimum(scaled_BS, least_BS))
    return np.maximum(1, np.where(choice_BS == NEUTRAL, base_BS, moved_BS))


def solve_bounded(profile: Profile, measured: Measured, *, headroom_B: Floats, crowd_B: Floats) -> tuple[Ints, Floats]:
    """The programme's workers and rate for a demand, with at most `crowd` threads per core that need one.

    Without that bound, workers that slow each other down would run away: they take longer, so the programme adds more.
    """
    core_BS = profile.seconds_BS * profile.core_share_BS / crowd_B[:, None]
    demand_B = headroom_B * np.maximum(measured.demand_B, 1e-9)
    return solve_workers(profile.seconds_BS, np.maximum(profile.cpu_BS, core_BS), measured, demand_B=demand_B)


class Watcher:
    """Turns measurements into observations: a profile and dimensionless ratios, the last three intervals stacked."""

    def __init__(self, measured: Measured) -> None:
        self.profile = Profile(measured)
        self._least_BS = measured.seconds_BS
        self._rate_B = measured.rows_per_s_B
        self.programme_BS, self._expected_B = self._solve(measured)
        figures_BF = self._figures(measured)
        self._stack = np.repeat(figures_BF[:, None, :], NUM_STACKED, axis=1)

    def update(self, measured: Measured) -> None:
        self.profile.update(measured)
        self._least_BS = np.where(
            self.profile.is_new_B[:, None], measured.seconds_BS, np.minimum(self._least_BS, measured.seconds_BS)
        )
        self.programme_BS, self._expected_B = self._solve(measured)
        figures_BF = self._figures(measured)
        self._stack = np.concatenate([self._stack[:, 1:], figures_BF[:, None, :]], axis=1)
        self._rate_B = measured.rows_per_s_B

    @property
    def observation(self) -> npt.NDArray[np.float32]:
        return self._stack.reshape(len(self._stack), -1).astype(np.float32)

    def _solve(self, measured: Measured) -> tuple[Ints, Floats]:
        headroom_B = np.where(measured.stall_B > MAX_KNOWN_STALL, np.inf, PROGRAMME_HEADROOM)
        crowd_B = np.full(len(measured), PROGRAMME_CROWD)
        workers_BS, expected_B = solve_bounded(self.profile, measured, headroom_B=headroom_B, crowd_B=crowd_B)
        return clip_workers(workers_BS, measured)[0], expected_B

    def _figures(self, measured: Measured) -> Floats:
        cores_B1, expected_B = measured.cores_B[:, None], np.maximum(self._expected_B, 1e-9)
        seconds_BS, workers_BS = self.profile.seconds_BS, measured.workers_BS
        rate_B1 = measured.rows_per_s_B[:, None]
        stage_figures = [
            workers_BS / cores_B1,
            np.log(workers_BS / self.programme_BS),
            self.profile.cpu_BS / np.maximum(seconds_BS, 1e-12),
            measured.queue_BS,
            rate_B1 * measured.seconds_BS / workers_BS,  # how busy the workers are
            np.log(np.maximum(seconds_BS, 1e-12) / np.maximum(self._least_BS, 1e-12)),  # slowdown relative to the best
            workers_BS * measured.item_bytes_BS / np.maximum(measured.free_bytes_B, 1.0)[:, None],
        ]
        busy_B = (workers_BS * self.profile.cpu_BS / np.maximum(seconds_BS, 1e-12)).sum(axis=1)
        common = [
            measured.stall_B,
            measured.rows_per_s_B / expected_B,
            measured.demand_B / expected_B,
            busy_B / measured.cores_B,
            (workers_BS * measured.item_bytes_BS).sum(axis=1) / np.maximum(measured.free_bytes_B, 1.0),
            np.log2(measured.cores_B) / 8,
            np.log(np.maximum(measured.rows_per_s_B, 1e-9) / np.maximum(self._rate_B, 1e-9)),
            self.profile.is_new_B.astype(np.float64),
        ]
        stacked = np.concatenate([*stage_figures, np.stack(common, axis=1)], axis=1)
        clipped: Floats = np.clip(np.nan_to_num(stacked), -5.0, 5.0)
        return clipped
