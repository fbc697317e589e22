"""Trains the policy in simulation: `python benchmarks/intune_pretraining.py OUT.safetensors` made the shipped one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from recmill.tuning.env import IngestTask, spaces
from recmill.tuning.policy import save_policy

PRETRAIN_STEPS = 500_000  # about 90 s on one core
HYPERPARAMETERS: dict[str, Any] = {
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "learning_rate": 1e-3,
    "ent_coef": 0.002,
    "n_epochs": 5,
    "policy_kwargs": {"net_arch": [64, 64]},
}


class IngestVecEnv(VecEnv):
    """Many simulated pipelines in one array: a step of 8 costs as much as a step of one."""

    def __init__(self, num_envs: int = 8, *, seed: int = 0, **task: Any) -> None:
        super().__init__(num_envs, *spaces())
        self._task = IngestTask(num_envs, seed=seed, **task)
        self._first_seed = seed

    def reset(self) -> VecEnvObs:
        return self._task.reset(self._first_seed)

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._actions = actions.astype(np.int64)

    def step_wait(self) -> VecEnvStepReturn:
        observation, reward = self._task.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.full(self.num_envs, self._task.is_over)
        if self._task.is_over:
            infos = [{"terminal_observation": own, "TimeLimit.truncated": True} for own in observation]
            observation = self._task.renew()
        return observation, reward.astype(np.float32), ended, infos

    def close(self) -> None:
        """Nothing to close."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise NotImplementedError("simulated pipelines have no attributes to set")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("simulated pipelines have no methods to call")

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def pretrain(*, steps: int = PRETRAIN_STEPS, num_envs: int = 64) -> PPO:
    """A policy trained in the simulator; SB3 prints how far it is."""
    rollout = min(32, max(8, steps // num_envs))
    options = {**HYPERPARAMETERS, "n_steps": rollout, "batch_size": min(512, rollout * num_envs)}
    # On the CPU: the networks are small.
    model = PPO("MlpPolicy", IngestVecEnv(num_envs), seed=0, device="cpu", verbose=1, **options)
    return model.learn(total_timesteps=steps)


if __name__ == "__main__":
    save_policy(pretrain(), Path(sys.argv[1]))
