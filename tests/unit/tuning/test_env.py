import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from recmill.tuning.agent import Agent
from recmill.tuning.env import IngestEnv
from recmill.tuning.mlflow_writer import MlflowWriter
from recmill.tuning.online.learning import OnlineLearner
from recmill.tuning.policy import load_policy, save_policy
from recmill.tuning.residual import NEUTRAL

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
pretraining = import_module("intune_pretraining")


def test_gymnasium_and_sb3_accept_the_environment():
    check_env(IngestEnv(), skip_render_check=True)
    check_env_for_sb3(IngestEnv())


def test_a_seed_decides_everything():
    runs = []
    for _ in range(2):
        env = IngestEnv()
        observation, _ = env.reset(seed=7)
        rewards = []
        for step in range(10):
            observation, reward, ended, truncated, _ = env.step(np.full(5, (step + NEUTRAL) % 5))
            rewards.append(reward)
            assert not ended
            assert not truncated
        runs.append((observation.tolist(), rewards))
    assert runs[0] == runs[1]


def test_an_episode_is_cut_off_at_its_horizon():
    env = IngestEnv(horizon=6)
    env.reset(seed=0)
    cut = [env.step(np.full(5, NEUTRAL))[3] for _ in range(6)]
    assert cut == [False] * 5 + [True]


def test_pipelines_that_end_are_replaced_by_others():
    env = pretraining.IngestVecEnv(4, seed=3, horizon=6)
    env.reset()
    for step in range(1, 8):
        env.step_async(np.full((4, 5), NEUTRAL))
        observation, _, ended, infos = env.step_wait()
        assert ended.tolist() == [step == 6] * 4
        if step == 6:
            last = np.stack([info["terminal_observation"] for info in infos])
            assert not np.array_equal(last, observation)


def test_the_programmes_own_answer_earns_about_one():
    env = pretraining.IngestVecEnv(32, seed=3, kinds=("plain",), event_share=0.0)
    env.reset()
    as_programme = np.tile([NEUTRAL] * 4 + [0], (32, 1))
    for _ in range(5):
        env.step_async(as_programme)
        _, reward, _, _ = env.step_wait()
    assert abs(float(reward.mean()) - 1.0) < 0.03


def test_a_policy_trained_in_simulation_can_be_kept(tmp_path):
    policy = pretraining.pretrain(steps=256, num_envs=8)
    save_policy(policy, tmp_path / "policy.safetensors")
    observation = np.zeros((2, policy.observation_space.shape[0]), dtype=np.float32)
    again = load_policy(tmp_path / "policy.safetensors")
    assert np.array_equal(
        policy.predict(observation, deterministic=True)[0], again.predict(observation, deterministic=True)[0]
    )


def test_the_agent_learns_from_a_running_pipeline():
    from recmill.tuning.simulation.scenarios import draw_worlds
    from recmill.tuning.simulation.simulator import Simulator

    logged = []
    learner = OnlineLearner(load_policy(), writers=(MlflowWriter(logged.extend),))
    before = [parameter.clone() for parameter in learner.policy.policy.parameters()]
    world, _ = draw_worlds(np.random.default_rng(0), 1, kinds=("plain",), cores=(16,))
    simulator = Simulator(world)
    measured = simulator.reset()
    agent = Agent(learner=learner)
    agent.reset(measured)
    for _ in range(60):
        measured = simulator.step(agent.decide(measured))
    assert learner.num_updates >= 1
    assert any(
        not bool((old == new).all()) for old, new in zip(before, learner.policy.policy.parameters(), strict=True)
    )
    assert "agent/online/reward" in {name for name, *_ in logged}
