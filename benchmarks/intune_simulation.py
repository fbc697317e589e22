"""Controllers against the oracle in the calibrated simulator: shares of the best rate, after events too, and OOMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recmill.tuning.calibration import Calibration
from recmill.tuning.controllers import Controller
from recmill.tuning.scenarios import EVENTS, KINDS, draw_events, draw_worlds
from recmill.tuning.simulator import Event, Simulator, World, best_workers

INTERVALS = 60
EVENT_INTERVALS = range(25, 35)


@dataclass(frozen=True, kw_only=True)
class Exam:
    """Worlds with one event each and what the best allocation gives before and after it."""

    world: World
    event: Event
    kinds: np.ndarray
    event_kinds: np.ndarray
    before_B: np.ndarray
    after_B: np.ndarray
    seed: int


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How a controller did: one entry a world."""

    share_B: np.ndarray  # of the oracle's rows, over the whole run
    after_B: np.ndarray  # from two intervals after the event on
    decisions_B: np.ndarray  # until 90% of the oracle's rate
    num_ooms: int


def make_exam(calibration: Calibration, *, size: int, cores: Sequence[int], seed: int) -> Exam:
    rng = np.random.default_rng([seed, 7])
    world, kinds = draw_worlds(
        rng,
        size,
        cores=cores,
        seconds=calibration.seconds,
        cpu_shares=calibration.cpu_shares,
        contention=max(0.1, calibration.contention),
        overhead=max(0.05, calibration.overhead),
    )
    event, event_kinds = draw_events(rng, size, steps=EVENT_INTERVALS)
    _, before_B = best_workers(world)
    _, after_B = best_workers(event.applied(world, np.ones(size, dtype=np.bool_)))
    return Exam(
        world=world,
        event=event,
        kinds=np.array(kinds),
        event_kinds=np.array(event_kinds),
        before_B=before_B,
        after_B=after_B,
        seed=seed,
    )


def sit(exam: Exam, controller: Controller) -> Marks:
    """Run a controller through the exam."""
    simulator = Simulator(exam.world, event=exam.event, seed=exam.seed, has_credits=controller.is_guarded)
    measured = simulator.reset()
    controller.reset(measured)
    shares, is_after = [], []
    for _ in range(INTERVALS):
        measured = simulator.step(controller.decide(measured), buffer_bytes_B=controller.buffer_bytes(measured))
        best_B = np.where(simulator.step_B > exam.event.step_B, exam.after_B, exam.before_B)
        # Who takes memory that is not there is not better than the oracle.
        shares.append(np.minimum(1.02, simulator.rate_B / best_B))
        is_after.append(simulator.step_B > exam.event.step_B + 2)
    share_TB, after_TB = np.array(shares), np.array(is_after)
    reached_TB = share_TB >= 0.9
    return Marks(
        share_B=share_TB.mean(axis=0),
        after_B=(share_TB * after_TB).sum(axis=0) / after_TB.sum(axis=0),
        decisions_B=np.where(reached_TB.any(axis=0), reached_TB.argmax(axis=0) + 1, INTERVALS),
        num_ooms=int(simulator.num_failures_B.sum()),
    )


def describe(exams: Sequence[Exam], marks: Sequence[Marks]) -> dict[str, Any]:
    """One controller over all seeds: mean, tenth percentile, after the event, by kind, OOMs."""
    kinds = np.concatenate([exam.kinds for exam in exams])
    event_kinds = np.concatenate([exam.event_kinds for exam in exams])
    cores = np.concatenate([exam.world.cores_B for exam in exams])
    share = np.concatenate([mark.share_B for mark in marks])
    after = np.concatenate([mark.after_B for mark in marks])
    seeds = [float(mark.share_B.mean()) for mark in marks]
    return {
        "share": float(share.mean()),
        "p10": float(np.quantile(share, 0.1)),
        "seeds": seeds,
        "interval_95": _interval(seeds),
        "after": float(after.mean()),
        "after_seeds": [float(mark.after_B.mean()) for mark in marks],
        "decisions_to_90": float(np.median(np.concatenate([mark.decisions_B for mark in marks]))),
        "ooms": sum(mark.num_ooms for mark in marks),
        "by_kind": {kind: float(share[kinds == kind].mean()) for kind in KINDS},
        "after_by_event": {kind: float(after[event_kinds == kind].mean()) for kind in EVENTS},
        "by_cores": {f"{count:g}": float(share[cores == count].mean()) for count in np.unique(cores)},
    }


def _interval(values: Sequence[float]) -> list[float]:
    """95% interval of the mean over seeds (Student's t)."""
    from scipy import stats

    mean, size = float(np.mean(values)), len(values)
    if size < 2:
        return [mean, mean]
    half = float(stats.t.ppf(0.975, size - 1) * np.std(values, ddof=1) / np.sqrt(size))
    return [mean - half, mean + half]
