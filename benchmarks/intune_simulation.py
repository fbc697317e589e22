"""Controllers against the oracle in the calibrated simulator: shares of the best rate, after events too, and OOMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from intune_calibration import Calibration
from intune_controllers import Controller, Machines
from intune_oracle import best_workers

from recmill.tuning.simulation.scenarios import CONTENTION, EVENTS, KINDS, OVERHEAD, draw_events, draw_worlds
from recmill.tuning.simulation.simulator import Event, World

INTERVALS = 60
EVENT_INTERVALS = range(25, 35)
Joined = TypeVar("Joined", World, Event)


@dataclass(frozen=True, kw_only=True)
class Exam:
    """Worlds of several seeds with one event each, and what the best allocation gives before and after it."""

    world: World
    event: Event
    kinds: np.ndarray
    event_kinds: np.ndarray
    seeds: np.ndarray
    before_B: np.ndarray
    after_B: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Results of a controller: one entry per world."""

    share_B: np.ndarray  # of the oracle's rows, over the whole run
    after_B: np.ndarray  # from two intervals after the event on
    decisions_B: np.ndarray  # until 90% of the oracle's rate
    ooms_B: np.ndarray


def make_exam(calibration: Calibration, *, size: int, cores: Sequence[int], seeds: Sequence[int]) -> Exam:
    """`size` worlds per seed. All are simulated at once: a step of 96 worlds takes as long as one of 480."""
    drawn = [_draw(calibration, size=size, cores=cores, seed=seed) for seed in seeds]
    world, event = _joined([worlds for worlds, *_ in drawn]), _joined([events for _, _, events, _ in drawn])
    _, before_B = best_workers(world)
    _, after_B = best_workers(event.applied(world, np.ones(len(world), dtype=np.bool_)))
    return Exam(
        world=world,
        event=event,
        kinds=np.concatenate([kinds for _, kinds, *_ in drawn]),
        event_kinds=np.concatenate([kinds for *_, kinds in drawn]),
        seeds=np.repeat(seeds, size),
        before_B=before_B,
        after_B=after_B,
    )


def _draw(
    calibration: Calibration, *, size: int, cores: Sequence[int], seed: int
) -> tuple[World, list[str], Event, list[str]]:
    rng = np.random.default_rng([seed, 7])
    world, kinds = draw_worlds(rng, size, cores=cores, seconds=calibration.seconds, cpu_shares=calibration.cpu_shares)
    world = replace(
        world,
        contention_B=world.contention_B * (max(0.1, calibration.contention) / CONTENTION),
        overhead_B=world.overhead_B * (max(0.05, calibration.overhead) / OVERHEAD),
    )
    return world, kinds, *draw_events(rng, size, steps=EVENT_INTERVALS)


def _joined(parts: Sequence[Joined]) -> Joined:
    return type(parts[0])(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(parts[0])}
    )


def sit(exam: Exam, controller: Controller) -> Marks:
    """Run a controller through all worlds."""
    seed = int(exam.seeds[0])
    simulator = Machines(exam.world, event=exam.event, seed=seed, has_credits=controller.is_guarded)
    measured = simulator.reset()
    controller.reset(measured)
    shares, is_after = [], []
    for _ in range(INTERVALS):
        measured = simulator.step(controller.decide(measured), buffer_bytes_B=controller.buffer_bytes(measured))
        best_B = np.where(simulator.step_B > exam.event.step_B, exam.after_B, exam.before_B)
        # A controller that exceeds the memory does not beat the oracle.
        shares.append(np.minimum(1.02, simulator.rate_B / best_B))
        is_after.append(simulator.step_B > exam.event.step_B + 2)
    share_TB, after_TB = np.array(shares), np.array(is_after)
    reached_TB = share_TB >= 0.9
    return Marks(
        share_B=share_TB.mean(axis=0),
        after_B=(share_TB * after_TB).sum(axis=0) / after_TB.sum(axis=0),
        decisions_B=np.where(reached_TB.any(axis=0), reached_TB.argmax(axis=0) + 1, INTERVALS),
        ooms_B=simulator.num_failures_B,
    )


def describe(exam: Exam, marks: Marks) -> dict[str, Any]:
    """One controller over all seeds: mean, tenth percentile, after the event, by kind, OOMs."""
    share_B, after_B, cores_B = marks.share_B, marks.after_B, exam.world.cores_B
    own = [exam.seeds == seed for seed in dict.fromkeys(exam.seeds.tolist())]
    seeds = [float(share_B[chosen].mean()) for chosen in own]
    return {
        "share": float(share_B.mean()),
        "p10": float(np.quantile(share_B, 0.1)),
        "seeds": seeds,
        "interval_95": _interval(seeds),
        "after": float(after_B.mean()),
        "after_seeds": [float(after_B[chosen].mean()) for chosen in own],
        "decisions_to_90": float(np.median(marks.decisions_B)),
        "ooms": int(marks.ooms_B.sum()),
        "by_kind": {kind: float(share_B[exam.kinds == kind].mean()) for kind in KINDS},
        "after_by_event": {kind: float(after_B[exam.event_kinds == kind].mean()) for kind in EVENTS},
        "by_cores": {f"{count:g}": float(share_B[cores_B == count].mean()) for count in np.unique(cores_B)},
    }


def _interval(values: Sequence[float]) -> list[float]:
    """95% interval of the mean over seeds (Student's t)."""
    from scipy import stats

    mean, size = float(np.mean(values)), len(values)
    if size < 2:
        return [mean, mean]
    half = float(stats.t.ppf(0.975, size - 1) * np.std(values, ddof=1) / np.sqrt(size))
    return [mean - half, mean + half]
