"""The limits that no controller may pass: workers a stage, slots, memory. It clips every action."""

from __future__ import annotations

import numpy as np

from recmill.tuning.measurement import Bools, Floats, Ints, Measured


def fits(workers_BS: Ints, *, slots_B: Ints, item_bytes_BS: Floats, free_bytes_B: Floats) -> Bools:
    """Where that many workers stay within slots and memory."""
    inside: Bools = (workers_BS.sum(axis=1) <= slots_B) & ((workers_BS * item_bytes_BS).sum(axis=1) <= free_bytes_B)
    return inside


def clip_workers(wanted_BS: Ints, measured: Measured) -> tuple[Ints, Bools]:
    """The wanted workers, at least one a stage, scaled down together where they do not fit; and where they were.

    One worker a stage is always allowed: whether that fits is asked before anything starts, and credits at admission
    hold the limit whatever the workers are.
    """
    workers_BS = np.maximum(1, wanted_BS)
    limits = {
        "slots_B": measured.slots_B,
        "item_bytes_BS": measured.item_bytes_BS,
        "free_bytes_B": measured.free_bytes_B,
    }
    is_clipped = (wanted_BS < 1).any(axis=1) | ~fits(workers_BS, **limits)
    low, high = np.zeros(len(measured)), np.ones(len(measured))
    scaled_BS = workers_BS
    if not fits(workers_BS, **limits).all():
        for _ in range(10):  # 1 / 1024 of the wanted workers is finer than one worker
            middle = (low + high) / 2
            tried = np.maximum(1, np.floor(workers_BS * middle[:, None]).astype(np.int64))
            is_inside = fits(tried, **limits)
            low, high = np.where(is_inside, middle, low), np.where(is_inside, high, middle)
        shrunk = np.maximum(1, np.floor(workers_BS * low[:, None]).astype(np.int64))
        scaled_BS = np.where(fits(workers_BS, **limits)[:, None], workers_BS, shrunk)
    return scaled_BS, is_clipped
