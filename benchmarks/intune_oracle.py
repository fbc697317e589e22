"""The best workers of simulated pipelines, with full knowledge of them."""

from __future__ import annotations

import numpy as np

from recmill.tuning.guard import clip_workers
from recmill.tuning.measurement import Floats, Ints
from recmill.tuning.simulation.simulator import World, steady_rate


def best_workers(world: World, *, num_levels: int = 80, num_rounds: int = 12) -> tuple[Ints, Floats]:
    """The workers with the highest rate.

    Fewer workers never slow another stage, so the best allocation has the fewest that sustain its rate: try a range of
    rates, then move single workers as long as that helps.
    """
    size, num_stages = world.seconds_BS.shape
    best_BS = np.ones((size, num_stages), dtype=np.int64)
    best_B = steady_rate(world, best_BS)

    def consider(tried_BS: Ints) -> None:
        nonlocal best_BS, best_B
        clipped_BS, _ = clip_workers(tried_BS, world)
        rate_B = steady_rate(world, clipped_BS)
        is_better = rate_B > best_B * (1 + 1e-9)
        best_BS, best_B = np.where(is_better[:, None], clipped_BS, best_BS), np.maximum(best_B, rate_B)

    most_B = np.minimum(world.trainer_B, world.cores_B / (world.seconds_BS * world.cpu_share_BS).sum(axis=1))
    for level in np.linspace(1 / num_levels, 1.0, num_levels):
        consider(_workers_for(world, level * most_B))
    for _ in range(num_rounds):
        before_B = best_B
        for moves_S in _moves(num_stages):
            change_BS = np.sign(moves_S) * np.maximum(1, np.rint(best_BS * np.abs(moves_S)).astype(np.int64))
            consider(best_BS + change_BS.astype(np.int64))
        if np.array_equal(best_B, before_B):
            break
    return best_BS, best_B


def _moves(num_stages: int) -> list[Floats]:
    """Changes to try: one stage, one up and another down, or all; by a share, or by one worker (a tiny share)."""
    moves = [np.full(num_stages, share) for share in (-0.1, -0.03, 0.03, 0.1)]
    for stage in range(num_stages):
        for share in (-0.1, -0.03, -1e-9, 1e-9, 0.03, 0.1):
            alone = np.zeros(num_stages)
            alone[stage] = share
            moves.append(alone)
            for other in range(num_stages):
                if other != stage and share > 0:
                    pair = alone.copy()
                    pair[other] = -share
                    moves.append(pair)
    return moves


def _workers_for(world: World, rate_B: Floats) -> Ints:
    """The fewest workers per stage that sustain a rate, found by iterating with the slowdown they cause."""
    cpu_B = (world.seconds_BS * world.cpu_share_BS).sum(axis=1)
    w_BS = np.ones_like(world.seconds_BS)
    for _ in range(6):
        law_BS = 1 + world.sigma_BS * (w_BS - 1) + world.kappa_BS * w_BS * (w_BS - 1)
        threads_B = (w_BS * world.cpu_share_BS).sum(axis=1)
        crowd_B = 1 + world.overhead_B * np.maximum(0, threads_B / world.cores_B - 1)
        swell_B = crowd_B * (1 + world.contention_B * cpu_B * crowd_B / world.cores_B * rate_B)
        w_BS = np.clip(rate_B[:, None] * world.seconds_BS * law_BS * swell_B[:, None], 1, world.slots_B[:, None])
    return np.ceil(w_BS - 1e-9).astype(np.int64)
