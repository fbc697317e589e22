"""Learning from a real pipeline: PPO updates from the policy's own decisions and their rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import KVWriter

DECISIONS_PER_UPDATE = 8
LEARNING_RATE = 1e-4  # a tenth of the rate in pretraining, so that a few noisy intervals do not undo it


class OnlineLearner:
    """Collects the decisions of one pipeline and updates the policy with them."""

    def __init__(self, policy: PPO, *, writers: tuple[KVWriter, ...] = ()) -> None:
        from stable_baselines3.common.buffers import RolloutBuffer
        from stable_baselines3.common.logger import Logger

        self.policy, self.num_updates = policy, 0
        policy.set_logger(Logger(folder=None, output_formats=list(writers)))
        policy.lr_schedule = lambda _: LEARNING_RATE
        policy.batch_size, policy.n_epochs = DECISIONS_PER_UPDATE, 3
        self._buffer = RolloutBuffer(
            DECISIONS_PER_UPDATE,
            policy.observation_space,
            policy.action_space,
            device="cpu",
            gamma=policy.gamma,
            gae_lambda=policy.gae_lambda,
            n_envs=1,
        )
        self._pending: tuple[Any, ...] | None = None
        self._is_start = True

    def choose(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """An action sampled from the policy; report its reward with `note`."""
        with torch.no_grad():
            action, value, log_prob = self.policy.policy(torch.as_tensor(observation))
        chosen: npt.NDArray[np.int64] = action.numpy().astype(np.int64)
        self._pending = (observation, chosen, value, log_prob)
        return chosen

    def note(self, reward: float, observation: npt.NDArray[np.float32]) -> None:
        """Record the reward of the last choice and the new observation."""
        if self._pending is None:
            return
        seen, action, value, log_prob = self._pending
        self._pending = None
        self._buffer.add(seen, action, np.array([reward]), np.array([self._is_start]), value, log_prob)
        self._is_start = False
        if not self._buffer.full:
            return
        with torch.no_grad():
            last_value = self.policy.policy.predict_values(torch.as_tensor(observation))
        self._buffer.compute_returns_and_advantage(last_values=last_value, dones=np.zeros(1))
        self.policy.rollout_buffer = self._buffer
        self.policy.train()
        self.num_updates += 1
        self.policy.logger.record("online/reward", float(self._buffer.rewards.mean()))
        self.policy.logger.dump(self.num_updates)
        self._buffer.reset()
        self._is_start = True

    def forget(self) -> None:
        """Discard the last choice, because it did not run."""
        self._pending = None
