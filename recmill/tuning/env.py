"""The simulator as a gymnasium environment for one pipeline, and the task that many pipelines share.

The reward is the rate relative to that of the linear programme's own answer, minus a small penalty per moved worker and
a larger one for requests that the guard rejects. Shape suffixes: B = pipelines, A = choices, F = figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Floats, Ints, Measured
from recmill.tuning.residual import MOVE_COST, NUM_CHOICES, Watcher, correct_workers, num_figures
from recmill.tuning.simulation.scenarios import EVENTS, KINDS, draw_events, draw_worlds
from recmill.tuning.simulation.simulator import Simulator, steady_rate

HORIZON = 40
CORES = (4, 8, 16, 32, 64, 128)
CLIP_COST = 0.2
NUM_STAGES = 4


def spaces() -> tuple[Any, Any]:
    """The observation space and the action space."""
    observation = gymnasium.spaces.Box(-5.0, 5.0, shape=(num_figures(NUM_STAGES),), dtype=np.float32)
    return observation, gymnasium.spaces.MultiDiscrete([NUM_CHOICES] * (NUM_STAGES + 1))


class IngestTask:
    """B random pipelines, each with at most one event, that begin and end together."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        kinds: Sequence[str] = KINDS,
        horizon: int = HORIZON,
        event_share: float = 0.7,
    ) -> None:
        self.size, self.horizon = size, horizon
        self._kinds, self._event_share = tuple(kinds), event_share
        self.reset(seed)

    def reset(self, seed: int) -> npt.NDArray[np.float32]:
        self._rng = np.random.default_rng(seed)
        return self.renew()

    def renew(self) -> npt.NDArray[np.float32]:
        """Begin with new pipelines."""
        kinds = [str(kind) for kind in self._rng.permutation(self._kinds)]
        world, _ = draw_worlds(self._rng, self.size, kinds=kinds, cores=CORES)
        kinds = [str(kind) for kind in self._rng.permutation(EVENTS)]
        steps = range(self.horizon // 4, max(self.horizon // 4 + 1, 3 * self.horizon // 4))
        event, _ = draw_events(self._rng, self.size, steps=steps, kinds=kinds, share=self._event_share)
        self._simulator = Simulator(world, event=event, seed=int(self._rng.integers(2**31)))
        self._measured: Measured = self._simulator.reset()
        self._age = 0
        self._watcher = Watcher(self._measured)
        return self._watcher.observation

    @property
    def is_over(self) -> bool:
        return self._age >= self.horizon

    def step(self, action_BA: Ints) -> tuple[npt.NDArray[np.float32], Floats]:
        """(observation, reward)."""
        measured, simulator = self._measured, self._simulator
        wanted_BS = correct_workers(action_BA, self._watcher.profile, measured)
        workers_BS, is_clipped = clip_workers(wanted_BS, measured)
        programme_BS = self._watcher.programme_BS
        moved_B = np.abs(workers_BS - measured.workers_BS).sum(axis=1)
        self._measured = simulator.step(workers_BS)
        reference_B = steady_rate(simulator.world, clip_workers(programme_BS, simulator.world)[0])
        reward_B = steady_rate(simulator.world, simulator.workers_BS) / np.maximum(reference_B, 1e-9)
        reward_B = reward_B - MOVE_COST * moved_B / measured.cores_B - CLIP_COST * is_clipped
        self._watcher.update(self._measured)
        self._age += 1
        return self._watcher.observation, reward_B


class IngestEnv(gymnasium.Env[npt.NDArray[np.float32], npt.NDArray[np.int64]]):
    """One simulated ingestion pipeline whose workers the agent sets in every interval."""

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own name and type

    def __init__(self, *, seed: int = 0, **task: Any) -> None:
        """`task` as in IngestTask: kinds, horizon, event_share."""
        self.observation_space, self.action_space = spaces()
        self._seed = seed
        self._task = IngestTask(1, seed=seed, **task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._seed = self._seed + 1 if seed is None else seed
        return self._task.reset(self._seed)[0], {}

    def step(self, action: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward = self._task.step(np.asarray(action, dtype=np.int64)[None])
        return observation[0], float(reward[0]), False, self._task.is_over, {}
