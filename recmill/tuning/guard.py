"""Limits for all controllers: at least one worker per stage, slots, memory. Every action is clipped to them."""

from __future__ import annotations

import numpy as np

from recmill.tuning.measurement import Bools, Floats, Ints, Limits


def fits(workers_BS: Ints, limits: Limits) -> Bools:
    """Where these workers stay within slots and memory."""
    num_workers_B, held_B = workers_BS.sum(axis=1), (workers_BS * limits.item_bytes_BS).sum(axis=1)
    inside_B: Bools = (num_workers_B <= limits.slots_B) & (held_B <= limits.free_bytes_B)
    return inside_B


def clip_workers(wanted_BS: Ints, limits: Limits) -> tuple[Ints, Bools]:
    """(the wanted workers, at least one per stage, scaled down where they do not fit; where they were clipped).

    One worker per stage is always allowed: the pipeline checks that before it starts, and credits at admission enforce
    the memory limit for any number of workers.
    """
    workers_BS: Ints = np.maximum(1, wanted_BS)
    fits_B = fits(workers_BS, limits)
    is_clipped_B: Bools = (wanted_BS < 1).any(axis=1) | ~fits_B
    if fits_B.all():
        return workers_BS, is_clipped_B
    low_B, high_B = np.zeros(len(limits)), np.ones(len(limits))
    for _ in range(10):  # 1 / 1024 of the wanted workers is finer than one worker
        middle_B = (low_B + high_B) / 2
        is_inside_B = fits(_scaled(workers_BS, middle_B), limits)
        low_B, high_B = np.where(is_inside_B, middle_B, low_B), np.where(is_inside_B, high_B, middle_B)
    return np.where(fits_B[:, None], workers_BS, _scaled(workers_BS, low_B)), is_clipped_B


def _scaled(workers_BS: Ints, share_B: Floats) -> Ints:
    scaled_BS: Ints = np.maximum(1, np.floor(workers_BS * share_B[:, None]).astype(np.int64))
    return scaled_BS
