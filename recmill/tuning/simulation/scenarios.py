"""Random machines around measured stages, for training and evaluating controllers.

Kinds: "plain" (the stages determine the rate), "contended" (stages and workers slow each other down), "trainer" (the
trainer limits the rate and slows down as cores fill up), "memory" (the memory limit matters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recmill.tuning.measurement import Floats
from recmill.tuning.simulation.simulator import Event, World

KINDS = ("plain", "contended", "trainer", "memory")
EVENTS = ("cores", "storage", "trainer", "memory")
# Seconds per row for one worker and the share of them on a core. Not a measurement: round figures close to those of row
# groups of 8,192 rows with 13 dense and 26 list features (decode 25 ms); a calibration replaces them.
DEFAULT_SECONDS = (0.35e-6, 3.0e-6, 0.9e-6, 0.4e-6)
DEFAULT_CPU_SHARES = (0.4, 0.97, 0.97, 0.95)
DEFAULT_ROW_BYTES = 1_000.0
CONTENTION, OVERHEAD = 0.5, 0.3  # centres of their distributions
ROWS_PER_ITEM = 8_192


def draw_worlds(
    rng: np.random.Generator,
    size: int,
    *,
    kinds: Sequence[str] = KINDS,
    cores: Sequence[int] = (8, 16, 32, 64, 128),
    seconds: Sequence[float] = DEFAULT_SECONDS,
    cpu_shares: Sequence[float] = DEFAULT_CPU_SHARES,
) -> tuple[World, list[str]]:
    """`size` random machines of alternating kinds."""
    num_stages = len(seconds)
    kind_B = [kinds[index % len(kinds)] for index in range(size)]
    is_contended = np.array([kind == "contended" for kind in kind_B])
    is_trainer = np.array([kind == "trainer" for kind in kind_B])
    is_memory = np.array([kind == "memory" for kind in kind_B])
    cores_B = rng.choice(np.asarray(cores, dtype=np.float64), size)
    seconds_BS = np.asarray(seconds) * np.exp(rng.normal(0, 0.7, (size, num_stages)))
    share_BS = np.clip(np.asarray(cpu_shares) * rng.uniform(0.9, 1.05, (size, num_stages)), 0.02, 1.0)
    share_BS[:, 0] = np.clip(share_BS[:, 0] * rng.uniform(0.2, 1.2, size), 0.05, 1.0)
    cpu_B = (seconds_BS * share_BS).sum(axis=1)
    most_B = cores_B / cpu_B
    sigma_BS = rng.uniform(0, 0.004, (size, num_stages))
    kappa_BS = np.zeros((size, num_stages))
    sigma_BS[is_contended] *= 2
    kappa_BS[is_contended] = rng.uniform(0, 4e-5, (int(is_contended.sum()), num_stages))
    trainer_B = most_B * np.where(is_trainer, rng.uniform(0.35, 0.9, size), rng.uniform(1.2, 3.0, size))
    item_BS = ROWS_PER_ITEM * DEFAULT_ROW_BYTES * rng.uniform(0.5, 3.0, (size, num_stages))
    needed_B = (item_BS * seconds_BS).sum(axis=1) * np.minimum(most_B, trainer_B)
    base_B = 4 * item_BS.max(axis=1)
    world = World(
        seconds_BS=seconds_BS,
        cpu_share_BS=share_BS,
        sigma_BS=sigma_BS,
        kappa_BS=kappa_BS,
        contention_B=CONTENTION * np.where(is_contended, rng.uniform(0.6, 2.0, size), 0.2 * rng.uniform(0, 1, size)),
        overhead_B=OVERHEAD * rng.uniform(0.3, 1.5, size),
        cores_B=cores_B,
        slots_B=(4 * cores_B).astype(np.int64),
        trainer_B=trainer_B,
        trainer_slowing_B=np.where(is_trainer, rng.uniform(0.15, 0.45, size), 0.0),
        trainer_knee_B=np.where(is_trainer, rng.uniform(0.2, 0.5, size), 1.0),
        item_bytes_BS=item_BS,
        base_bytes_B=base_B,
        limit_bytes_B=base_B + needed_B * np.where(is_memory, rng.uniform(0.45, 0.9, size), rng.uniform(2, 6, size)),
    )
    return world, kind_B


def draw_events(
    rng: np.random.Generator, size: int, *, steps: range, kinds: Sequence[str] = EVENTS, share: float = 1.0
) -> tuple[Event, list[str]]:
    """One event each, of alternating kinds, at a step within `steps`; with `share` below 1 some have none."""
    kind_B = [kinds[(index // len(KINDS)) % len(kinds)] for index in range(size)]
    named = np.array(kind_B)

    def factor(kind: str, low: float, high: float) -> Floats:
        drawn = rng.uniform(low, high, size)
        return np.where(named == kind, drawn, 1.0)

    event = Event(
        step_B=rng.integers(steps.start, steps.stop, size),
        cores_B=factor("cores", 0.4, 0.7),
        read_seconds_B=factor("storage", 2.0, 6.0),
        trainer_B=factor("trainer", 0.4, 0.7),
        memory_B=factor("memory", 0.3, 0.6),
    )
    happens = rng.random(size) < share
    return replace(event, step_B=np.where(happens, event.step_B, 10**9)), kind_B
