import itertools
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.tuning.agent import Agent
from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Measured, changed_conditions
from recmill.tuning.policy import load_policy
from recmill.tuning.programme import solve_workers
from recmill.tuning.residual import Watcher
from recmill.tuning.simulation.scenarios import draw_events, draw_worlds

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
compared = import_module("intune_controllers")


def measured_of(seconds, *, cores=8.0, slots=64, free_bytes=1e9, item_bytes=1.0, stall=0.5, rate=100.0) -> Measured:
    seconds_BS = np.array([seconds], dtype=np.float64)
    return Measured(
        workers_BS=np.ones_like(seconds_BS, dtype=np.int64),
        seconds_BS=seconds_BS,
        cpu_BS=seconds_BS.copy(),
        queue_BS=np.zeros_like(seconds_BS),
        rows_per_s_B=np.array([rate]),
        stall_B=np.array([stall]),
        cores_B=np.array([cores]),
        slots_B=np.array([slots]),
        item_bytes_BS=np.full_like(seconds_BS, item_bytes),
        base_bytes_B=np.array([10.0]),
        memory_bytes_B=np.array([20.0]),
        limit_bytes_B=np.array([10.0 + free_bytes]),
    )


@settings(max_examples=40, deadline=None)
@given(
    wanted=st.lists(st.integers(-5, 400), min_size=4, max_size=4),
    slots=st.integers(4, 200),
    free=st.floats(4, 500),
)
def test_the_guard_lets_nothing_past_its_limits(wanted, slots, free):
    measured = measured_of([1, 1, 1, 1], slots=slots, free_bytes=free)
    workers, is_clipped = clip_workers(np.array([wanted]), measured)
    assert (workers >= 1).all()
    assert workers.sum() <= slots
    assert workers.sum() <= free + 1e-9
    if not is_clipped[0]:
        assert workers[0].tolist() == wanted


def test_the_programme_is_the_best_of_all_whole_numbers():
    """By hand: the highest rate of all allocations within 9 slots, found by trying them."""
    seconds = [1e-3, 5e-3, 2e-3, 1e-3]
    measured = measured_of(seconds, cores=100.0, slots=9)
    workers, rate = solve_workers(measured.seconds_BS, measured.cpu_BS, measured)
    tried = [w for w in itertools.product(range(1, 7), repeat=4) if sum(w) <= 9]
    best = max(min(count / second for count, second in zip(w, seconds, strict=True)) for w in tried)
    assert min(workers[0] / seconds) >= best * 0.999
    assert rate[0] <= best * 1.001


@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        ({"cores": 4.0}, 4 / 9e-3),
        ({"cores": 1e9, "slots": 18}, 18 / 9e-3),
        ({"cores": 1e9, "free_bytes": 12.0}, 12 / 9e-3),
    ],
)
def test_cores_slots_and_memory_bound_the_programme(limits, bound):
    measured = measured_of([1e-3, 5e-3, 2e-3, 1e-3], **limits)
    workers, rate = solve_workers(measured.seconds_BS, measured.cpu_BS, measured)
    assert rate[0] <= bound * 1.0001
    assert workers.sum() <= limits.get("slots", 64)


def test_the_programme_aims_no_higher_than_the_demand():
    measured = measured_of([1e-3, 5e-3, 2e-3, 1e-3], cores=100.0)
    workers, _ = solve_workers(measured.seconds_BS, measured.cpu_BS, measured, demand_B=np.array([600.0]))
    assert workers[0].tolist() == [1, 3, 2, 1]


def test_a_change_outside_is_noticed_and_a_resize_is_not_one():
    before = measured_of([1e-3, 5e-3, 2e-3, 1e-3])
    assert not changed_conditions(before, before)[0]
    slower = replace(before, seconds_BS=before.seconds_BS * [[4, 1, 1, 1]])
    assert changed_conditions(before, slower)[0]
    assert changed_conditions(before, replace(before, cores_B=np.array([4.0])))[0]
    assert changed_conditions(before, replace(before, limit_bytes_B=before.limit_bytes_B / 2))[0]
    assert not changed_conditions(before, replace(slower, workers_BS=before.workers_BS * 8))[0]


@pytest.fixture(scope="module")
def exam():
    rng = np.random.default_rng(5)
    world, kinds = draw_worlds(rng, 48, cores=(32, 64))
    event, _ = draw_events(rng, 48, steps=range(12, 18))
    return world, event, np.array(kinds)


def run(exam, controller, intervals=30):
    world, event, _ = exam
    simulator = compared.Machines(world, event=event, seed=3, has_credits=controller.is_guarded)
    measured = simulator.reset()
    controller.reset(measured)
    rates = []
    for _ in range(intervals):
        workers = controller.decide(measured)
        assert (workers >= 1).all()
        if controller.is_guarded:
            assert (workers.sum(axis=1) <= measured.slots_B).all()
        measured = simulator.step(workers, buffer_bytes_B=controller.buffer_bytes(measured))
        rates.append(simulator.rate_B)
    return np.array(rates).mean(axis=0), simulator.num_failures_B.sum()


def test_the_controllers_rank_as_they_should(exam):
    found = {controller.name: run(exam, controller) for controller in compared.baselines()}
    mean = {name: rate.sum() for name, (rate, _) in found.items()}
    assert mean["LP re-profiled"] > mean["LP once"] > mean["even split"]
    assert mean["AUTOTUNE-like, guarded"] > mean["AUTOTUNE-like"]
    assert {name for name, (_, failures) in found.items() if failures} == {"AUTOTUNE-like"}


def test_the_shipped_agent_is_no_worse_than_the_programme_and_better_where_its_model_is_wrong(exam):
    programme, _ = run(exam, compared.LinearProgramme())
    agent, failures = run(exam, compared.TunedByAgent(Agent()))
    ratio, kinds = agent / programme, exam[2]
    assert failures == 0
    assert ratio.mean() > 1.0
    assert ratio[kinds == "trainer"].mean() > 1.05
    assert ratio[kinds == "plain"].mean() > 0.99
    assert ratio[kinds == "memory"].mean() > 0.99


class Saboteur:
    """A policy that always asks for as few workers as it can."""

    def predict(self, observation, deterministic):
        return np.zeros((len(observation), 5), dtype=np.int64), None


def test_a_policy_that_does_worse_is_replaced_by_the_programme(exam):
    world, event, kinds = exam
    chosen = kinds == "plain"
    plain = [type(own)(**{name: value[chosen] for name, value in vars(own).items()}) for own in (world, event)]
    plain.append(kinds)
    programme, _ = run(plain, compared.LinearProgramme())
    agent, _ = run(plain, compared.TunedByAgent(Agent(Saboteur())))
    assert agent.sum() > 0.85 * programme.sum()


def test_a_policy_that_is_not_there_is_one_sentence(tmp_path):
    from recmill.artifacts import InputError

    with pytest.raises(InputError, match="no such file, expected a policy"):
        load_policy(tmp_path / "nothing.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a policy")
    with pytest.raises(InputError, match="is not a safetensors file"):
        load_policy(tmp_path / "broken.safetensors")


def test_workers_in_each_others_way_do_not_run_away():
    """Each worker more of the second stage makes all of them wait longer: the programme alone asks for ever more."""
    measured = measured_of([1e-3, 5e-3, 2e-3, 1e-3], cores=16.0, slots=64, stall=1.0)
    watcher, programme = Watcher(measured), compared.LinearProgramme()
    programme.reset(measured)
    bounded, plain = measured, measured
    for _ in range(12):
        watcher.update(bounded)
        bounded = crowded(measured, watcher.programme_BS)
        plain = crowded(measured, programme.decide(plain))
    assert plain.workers_BS[0, 1] > 16
    assert watcher.programme_BS.sum() <= 1.25 * 16 + 4


def crowded(measured: Measured, workers_BS) -> Measured:
    """The same stages with other workers; the second takes longer by 6% a worker, none of it on a core."""
    seconds_BS = measured.seconds_BS.copy()
    seconds_BS[:, 1] *= 1 + 0.06 * (workers_BS[:, 1] - 1)
    return replace(measured, workers_BS=workers_BS, seconds_BS=seconds_BS)


def test_reads_that_wait_for_storage_are_not_bound_by_the_cores():
    before = measured_of([1e-4, 1e-3, 1e-3, 1e-3], cores=2.0, slots=64, stall=1.0)
    watcher = Watcher(before)
    late_BS = np.array([[50e-3, 1e-3, 1e-3, 1e-3]])
    watcher.update(replace(before, seconds_BS=late_BS))
    assert watcher.programme_BS[0, 0] >= 16
