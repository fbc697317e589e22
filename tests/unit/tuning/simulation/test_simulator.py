import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from recmill.artifacts import InputError
from recmill.artifacts.allocation import StageTime
from recmill.tuning.simulation.scenarios import EVENTS, KINDS, draw_events, draw_worlds
from recmill.tuning.simulation.simulator import Event, Simulator, World, steady_rate

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
calibration, compared, oracle = map(import_module, ("intune_calibration", "intune_controllers", "intune_oracle"))


def make_world(**changes) -> World:
    """One machine of 8 cores: stages of 1, 4, 2 and 1 milliseconds a row, all of them on a core."""
    figures = {
        "seconds_BS": np.array([[1e-3, 4e-3, 2e-3, 1e-3]]),
        "cpu_share_BS": np.ones((1, 4)),
        "sigma_BS": np.zeros((1, 4)),
        "kappa_BS": np.zeros((1, 4)),
        "contention_B": np.zeros(1),
        "overhead_B": np.zeros(1),
        "cores_B": np.array([8.0]),
        "slots_B": np.array([64]),
        "trainer_B": np.array([1e9]),
        "trainer_slowing_B": np.zeros(1),
        "trainer_knee_B": np.ones(1),
        "item_bytes_BS": np.ones((1, 4)),
        "base_bytes_B": np.zeros(1),
        "limit_bytes_B": np.array([1e9]),
    }
    return World(**(figures | {name: np.asarray(value) for name, value in changes.items()}))


def rate(world: World, *workers: int) -> float:
    return float(steady_rate(world, np.array([workers]))[0])


def test_the_slowest_stage_decides():
    assert rate(make_world(), 1, 1, 1, 1) == pytest.approx(250)
    assert rate(make_world(), 1, 2, 1, 1) == pytest.approx(500)


def test_the_cores_bound_the_sum():
    assert rate(make_world(), 8, 8, 8, 8) == pytest.approx(1000)  # 8 cores / 8 ms


def test_a_trainer_takes_no_more_than_it_can_and_slows_as_cores_fill():
    assert rate(make_world(trainer_B=[300.0]), 1, 4, 2, 1) == pytest.approx(300)
    slow = make_world(trainer_B=[300.0], trainer_slowing_B=[0.5], trainer_knee_B=[0.0])
    assert rate(slow, 1, 4, 2, 1) == pytest.approx(150)  # 8 threads on 8 cores
    assert rate(slow, 1, 2, 1, 1) == pytest.approx(300 * (1 - 0.5 * 5 / 8))


def test_contention_solves_for_itself():
    world = make_world(contention_B=[0.5])
    found = rate(world, 1, 2, 1, 1)
    slope = 0.5 * 8e-3 / 8
    assert found * 4e-3 * (1 + slope * found) == pytest.approx(2)


def test_threads_beyond_the_cores_cost():
    world = make_world(overhead_B=[0.3])
    assert rate(world, 8, 8, 8, 8) == pytest.approx(1000 / (1 + 0.3 * 3))


def test_the_oracle_finds_the_best_of_all_allocations():
    world = make_world(contention_B=[0.4], overhead_B=[0.5], trainer_B=[700.0], trainer_slowing_B=[0.4])
    counts = np.array(np.meshgrid(*[range(1, 9)] * 4)).reshape(4, -1).T
    many = World(**{name: np.repeat(value, len(counts), axis=0) for name, value in vars(world).items()})
    assert oracle.best_workers(world)[1][0] >= 0.999 * steady_rate(many, counts).max()


def test_without_credits_too_much_memory_kills_and_with_them_it_does_not():
    world = make_world(item_bytes_BS=np.full((1, 4), 10.0), limit_bytes_B=[100.0])
    many = np.full((1, 4), 8)
    for has_credits, kills in ((True, 0), (False, 1)):
        simulator = compared.Machines(world, has_credits=has_credits)
        simulator.reset()
        measured = simulator.step(many)
        assert simulator.num_failures_B[0] == kills
        assert (measured.rows_per_s_B[0] == 0) == bool(kills)
        if has_credits:
            assert measured.workers_BS.sum() <= 10


def test_an_event_changes_the_world_once():
    event = Event(
        step_B=np.array([2]),
        cores_B=np.array([0.5]),
        read_seconds_B=np.array([4.0]),
        trainer_B=np.array([1.0]),
        memory_B=np.array([0.5]),
    )
    simulator = Simulator(make_world(), event=event, noise=0.0)
    simulator.reset()
    cores = [float(simulator.step(np.ones((1, 4), dtype=np.int64)).cores_B[0]) for _ in range(4)]
    assert cores == [8, 4, 4, 4]
    assert simulator.world.seconds_BS[0, 0] == pytest.approx(4e-3)
    assert simulator.world.cpu_share_BS[0, 0] == pytest.approx(0.25)  # the work stays, the wait grows
    assert simulator.world.limit_bytes_B[0] == 5e8


def test_every_kind_of_world_and_event_is_drawn():
    rng = np.random.default_rng(0)
    world, kinds = draw_worlds(rng, 32)
    _, events = draw_events(rng, 32, steps=range(5, 9))
    assert set(kinds) == set(KINDS)
    assert set(events) == set(EVENTS)
    assert (world.limit_bytes_B > world.base_bytes_B).all()
    assert {(kind, event) for kind, event in zip(kinds, events, strict=True)} == {
        (kind, event) for kind in KINDS for event in EVENTS
    }


TIMES = {
    stage: StageTime(seconds=seconds, cpu_seconds=0.98 * seconds, rows=8_192)
    for stage, seconds in (("read", 0.001), ("decode", 0.02), ("transform", 0.005), ("batch", 0.002))
}


def simulated_points(scale: float, *, noise: float) -> list:
    """What a machine that obeys the model would give."""
    points = [
        calibration.CalibrationPoint(workers=workers, read_delay_s=delay, rows_per_s=1.0)
        for workers, delay in calibration.POINTS
    ]
    seconds = np.array([TIMES[stage].seconds / 8_192 for stage in TIMES])
    world = calibration._world(points, seconds, np.full(4, 0.98), 8_192, 2.0, np.array([scale, 0.02, 0.3, 0.2]))
    rates = steady_rate(world, calibration._workers(points))
    rates *= np.exp(np.random.default_rng(1).normal(0, noise, len(points)))
    return [replace(point, rows_per_s=float(found)) for point, found in zip(points, rates, strict=True)]


def test_a_calibration_finds_the_machine_it_was_measured_on():
    found = calibration.fit(simulated_points(1.4, noise=0.02), TIMES, cores=2)
    assert found.error < 0.1
    assert found.seconds[1] == pytest.approx(1.4 * 0.02 / 8_192, rel=0.2)
    assert sum(point.is_held_out for point in found.points) >= 3
    found.check()


def test_a_calibration_that_misses_refuses_itself():
    found = calibration.fit(simulated_points(1.0, noise=1.5), TIMES, cores=2)
    assert found.error > 0.15
    with pytest.raises(InputError, match="misses held-out measurements by"):
        found.check()
