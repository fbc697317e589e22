"""The learning controller: a policy that corrects the linear programme and falls back to it when that is better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Floats, Ints, Measured
from recmill.tuning.policy import load_policy
from recmill.tuning.residual import MOVE_COST, Watcher, correct_workers

if TYPE_CHECKING:
    from stable_baselines3 import PPO

    from recmill.tuning.online.learning import OnlineLearner

NUM_PROBES = 2  # intervals with the programme's own answer, to measure what the agent must beat
WORSE = 0.99
FIRST_BAN = 6
MAX_BAN = 48


class Agent:
    """The policy's corrections, as long as they are at least as fast as the programme under the same conditions.

    After a start or a change of conditions, the programme's own answer runs for two intervals; its rate is the mark. If
    the policy is then slower, the programme takes over for some intervals, twice as many each time.
    """

    def __init__(self, policy: PPO | None = None, *, learner: OnlineLearner | None = None) -> None:
        """With a `learner` (one pipeline only) it samples actions and learns from their results."""
        self.policy = learner.policy if learner else policy or load_policy()
        self._learner = learner

    def reset(self, measured: Measured) -> None:
        """Start a new run with these measurements; call it before the first decision."""
        size = len(measured)
        self._watcher = Watcher(measured)
        self._age_B = np.zeros(size, dtype=np.int64)  # intervals under the current conditions
        self._mark_B = np.zeros(size)  # rate of the programme
        self._mean_B = np.zeros(size)  # mean rate of the policy
        self._ban_B = np.zeros(size, dtype=np.int64)  # remaining intervals of the programme
        self._next_ban_B = np.full(size, FIRST_BAN)
        self._was_policy_B = np.zeros(size, dtype=np.bool_)
        self.is_fallback_B = np.ones(size, dtype=np.bool_)
        self._last_BS = measured.workers_BS

    def decide(self, measured: Measured) -> Ints:
        """The workers of every stage for the next interval, [B, S], within the limits."""
        self._watcher.update(measured)
        self._judge(measured.rows_per_s_B)
        self.is_fallback_B = (self._age_B < NUM_PROBES) | (self._ban_B > 0)
        corrected_BS = correct_workers(self._choose(measured), self._watcher.profile, measured)
        # Workers that do not fit would be scaled down in proportion; the programme distributes them better.
        self.is_fallback_B = self.is_fallback_B | clip_workers(corrected_BS, measured)[1]
        self._was_policy_B = ~self.is_fallback_B
        chosen_BS = np.where(self.is_fallback_B[:, None], self._watcher.programme_BS, corrected_BS)
        return clip_workers(chosen_BS, measured)[0]

    def _choose(self, measured: Measured) -> Ints:
        observation = self._watcher.observation
        if self._learner is None:
            return np.asarray(self.policy.predict(observation, deterministic=True)[0], dtype=np.int64)
        if self._was_policy_B[0] and self._mark_B[0] > 0:
            moved = float(np.abs(measured.workers_BS - self._last_BS).sum() / measured.cores_B[0])
            self._learner.note(float(measured.rows_per_s_B[0] / self._mark_B[0]) - MOVE_COST * moved, observation)
        self._last_BS = measured.workers_BS
        action_BA = self._learner.choose(observation)
        if self.is_fallback_B[0]:
            self._learner.forget()
        return action_BA

    def _judge(self, rate_B: Floats) -> None:
        """Compare the rate of the last interval with the mark, and ban the policy where it is lower."""
        is_new = self._watcher.profile.is_new_B
        self._age_B = np.where(is_new, 0, self._age_B + 1)
        ran_programme = ~self._was_policy_B
        self._mark_B = np.where(
            is_new, 0.0, np.where(ran_programme, np.maximum(rate_B, 0.5 * (self._mark_B + rate_B)), self._mark_B)
        )
        mean_B = np.where(self._mean_B > 0, 0.5 * (self._mean_B + rate_B), rate_B)
        self._mean_B = np.where(is_new | ran_programme, 0.0, mean_B)
        is_worse = self._was_policy_B & ~is_new & (self._mean_B < WORSE * self._mark_B)
        self._ban_B = np.where(is_new, 0, np.maximum(0, self._ban_B - 1))
        self._ban_B = np.where(is_worse, self._next_ban_B, self._ban_B)
        self._next_ban_B = np.where(is_worse, np.minimum(MAX_BAN, 2 * self._next_ban_B), self._next_ban_B)
        self._next_ban_B = np.where(is_new, FIRST_BAN, self._next_ban_B)
