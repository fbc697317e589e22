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
from recmill.tuning.measurement import Bools, Floats, Ints, Measured
from recmill.tuning.residual import MOVE_COST, NUM_CHOICES, Watcher, correct_workers, num_figures
from recmill.tuning.simulation.scenarios import (
    DEFAULT_CPU_SHARES,
    DEFAULT_SECONDS,
    EVENTS,
    KINDS,
    draw_events,
    draw_worlds,
)
from recmill.tuning.simulation.simulator import Event, Simulator, World, steady_rate

HORIZON = 40
CLIP_COST = 0.2
NUM_STAGES = 4


def spaces() -> tuple[Any, Any]:
    """The observation space and the action space."""
    observation = gymnasium.spaces.Box(-5.0, 5.0, shape=(num_figures(NUM_STAGES),), dtype=np.float32)
    return observation, gymnasium.spaces.MultiDiscrete([NUM_CHOICES] * (NUM_STAGES + 1))


class IngestTask:
    """B random pipelines, each with at most one event; a finished pipeline is replaced by another."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        cores: Sequence[int] = (4, 8, 16, 32, 64, 128),
        kinds: Sequence[str] = KINDS,
        seconds: Sequence[float] = DEFAULT_SECONDS,
        cpu_shares: Sequence[float] = DEFAULT_CPU_SHARES,
        horizon: int = HORIZON,
        event_share: float = 0.7,
    ) -> None:
        self.size, self.horizon = size, horizon
        self._cores, self._kinds, self._seconds, self._cpu_shares = tuple(cores), tuple(kinds), seconds, cpu_shares
        self._event_share = event_share
        self.reset(seed)

    def reset(self, seed: int) -> npt.NDArray[np.float32]:
        self._rng = np.random.default_rng(seed)
        world, event = self._draw()
        self._simulator = Simulator(world, event=event, seed=int(self._rng.integers(2**31)))
        self._measured: Measured = self._simulator.reset()
        self._age_B = np.zeros(self.size, dtype=np.int64)
        self._watcher = Watcher()
        self._watcher.reset(self._measured)
        return self._watcher.observation

    def _draw(self) -> tuple[World, Event]:
        world, _ = draw_worlds(
            self._rng,
            self.size,
            kinds=[str(kind) for kind in self._rng.permutation(self._kinds)],
            cores=self._cores,
            seconds=self._seconds,
            cpu_shares=self._cpu_shares,
        )
        kinds = [str(kind) for kind in self._rng.permutation(EVENTS)]
        steps = range(self.horizon // 4, max(self.horizon // 4 + 1, 3 * self.horizon // 4))
        event, _ = draw_events(self._rng, self.size, steps=steps, kinds=kinds, share=self._event_share)
        return world, event

    def step(self, action_BA: Ints) -> tuple[npt.NDArray[np.float32], Floats, Bools, dict[str, Floats]]:
        """(observation, reward, which pipelines ended, figures of the interval)."""
        measured, simulator = self._measured, self._simulator
        wanted_BS = correct_workers(action_BA, self._watcher.profile, measured)
        workers_BS, is_clipped = clip_workers(wanted_BS, measured)
        programme_BS = self._watcher.programme_BS
        moved_B = np.abs(workers_BS - measured.workers_BS).sum(axis=1)
        self._measured = simulator.step(workers_BS)
        reference_B = steady_rate(simulator.world, clip_workers(programme_BS, simulator.limits())[0])
        reward_B = steady_rate(simulator.world, simulator.workers_BS) / np.maximum(reference_B, 1e-9)
        reward_B = reward_B - MOVE_COST * moved_B / measured.cores_B - CLIP_COST * is_clipped
        self._watcher.update(self._measured)
        self._age_B += 1
        what = {"rows_per_s": simulator.rate_B.copy(), "is_clipped": is_clipped.astype(np.float64)}
        return self._watcher.observation, reward_B, self._age_B >= self.horizon, what

    def renew(self, chosen: Bools) -> npt.NDArray[np.float32]:
        """Replace the chosen pipelines by new ones; returns the observation of all."""
        self._simulator.restart(chosen, *self._draw())
        fresh = self._simulator.measure_first(chosen, self._measured)
        self._measured = fresh
        self._age_B[chosen] = 0
        self._watcher.restart(chosen, fresh)
        return self._watcher.observation


class IngestEnv(gymnasium.Env[npt.NDArray[np.float32], npt.NDArray[np.int64]]):
    """One simulated ingestion pipeline whose workers the agent sets in every interval."""

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own name and type

    def __init__(self, *, seed: int = 0, **task: Any) -> None:
        """`task` as in IngestTask: cores, kinds, seconds, cpu_shares, horizon, event_share."""
        self.observation_space, self.action_space = spaces()
        self._seed = seed
        self._task = IngestTask(1, seed=seed, **task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed
        else:
            self._seed += 1
        return self._task.reset(self._seed)[0], {}

    def step(self, action: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, ended, what = self._task.step(np.asarray(action, dtype=np.int64)[None])
        info = {name: float(value[0]) for name, value in what.items()}
        return observation[0], float(reward[0]), False, bool(ended[0]), info
