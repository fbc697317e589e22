"""Decides whether hot batches pay: the exchange time they save against the swaps and syncs they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from recmill.artifacts import AccessProfile
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema
from recmill.planning.tiers.costs import ID_BYTES, WEIGHT_BYTES, torchrec_bytes
from recmill.profiling.samples import SampledRows

# Seconds per batch and rank besides the bytes. Assumed, not measured: TorchRec sends five messages (sizes, lengths,
# ids, rows, gradients), we send three (sizes, ids, gradients).
EXCHANGE_OVERHEAD_S = 3e-3
HOT_OVERHEAD_S = 1e-3
# Extra CPU time per id when rows are exchanged instead of hot: sorting by rank, sending, receiving, reordering.
# Measured on globo with two ranks, a million samples of 20 ids: 14 s with tiers, 17 s with TorchRec's tables.
EXCHANGE_S_PER_ID = 7e-7
COPY_BYTES_PER_S = 2e9  # rows into and out of the hot tables; assumed
TURNS_PER_EPOCH = 2  # of hot and cold batches, as the scheduler starts; per turn, rows enter and leave once
MIN_SHARE = 0.1  # of the samples; below it, an epoch is mostly cold batches
MIN_SPEED_UP = 1.05  # of the exchange: the accuracy of the estimate
WHOLE_SESSION_LOSS = 0.8  # keep sessions whole if at least this share of the hot samples remains


@dataclass(frozen=True, kw_only=True)
class HotCost:
    """The verdict. `expected_speed_up` is that of the exchange; `sessions`: whether the layout keeps them whole."""

    pays: bool
    reason: str
    sessions: Literal["whole", "split"]
    expected_speed_up: float = 1.0


def judge_hot_batches(
    schema: Schema,
    profile: AccessProfile,
    *,
    topology: Topology,
    batch_size: int,
    hot_bytes: int,
    is_hot_N: npt.NDArray[np.bool_],
    in_hot_session_N: npt.NDArray[np.bool_],
    sampled: Mapping[str, SampledRows],
    measures_N: npt.NDArray[np.int64],
    cold_bytes_s: float | None,
) -> HotCost:
    """Compare an epoch of exchanges with one of hot and cold batches.

    `measures_N`: the samples of `sampled` that `is_hot_N` is about. `cold_bytes_s`: transfer time of a batch where rows
    are placed in tiers; None: TorchRec's exchange.
    """
    sample_share, session_share = _mean(is_hot_N), _mean(in_hot_session_N)
    sessions: Literal["whole", "split"] = "whole" if session_share >= WHOLE_SESSION_LOSS * sample_share else "split"
    share, chosen_N = (session_share, in_hot_session_N) if sessions == "whole" else (sample_share, is_hot_N)
    if topology.world_size == 1:
        return HotCost(pays=False, reason="one rank exchanges nothing", sessions=sessions)
    if share < MIN_SHARE:
        reason = f"{share:.1%} of the samples read hot rows only, less than {MIN_SHARE:.0%}"
        return HotCost(pays=False, reason=reason, sessions=sessions)
    level = "inter" if topology.nodes > 1 else "intra"
    speed = topology.link("all_to_all", level).bytes_per_s
    num_samples = profile.num_samples_total or profile.num_samples
    num_batches = max(1.0, num_samples / batch_size)
    lengths = {name: entry.mean_length for name, entry in profile.duplication.items()}
    if cold_bytes_s is None:
        sent = sum(torchrec_bytes(table, schema, topology, batch_size, lengths, {}) for table in schema.tables)
        cold_bytes_s = sent / topology.world_size / speed
    ids_of_rank = sum(lengths.get(f.name, 1.0) for f in schema.id_features) * batch_size / topology.world_size
    cold_s = EXCHANGE_OVERHEAD_S + EXCHANGE_S_PER_ID * ids_of_rank + cold_bytes_s
    hot_s = HOT_OVERHEAD_S + _sync_bytes(schema, sampled, measures_N[chosen_N], topology, batch_size) / speed
    # Rows are sent by the ranks that hold them; every rank has them when they leave, so nothing is sent then.
    num_turns = TURNS_PER_EPOCH if share < 1 else 1
    swaps_s = num_turns * hot_bytes * (1 / speed + 4 / COPY_BYTES_PER_S)
    before = num_batches * cold_s
    after = num_batches * ((1 - share) * cold_s + share * hot_s) + swaps_s
    speed_up = before / after
    facts = (
        f"{share:.0%} of the samples are hot ({sessions} sessions); the exchange of a hot batch takes "
        f"{hot_s * 1e3:.1f} ms instead of {cold_s * 1e3:.1f} ms, swaps take {swaps_s:.2f} s per epoch of "
        f"{num_batches:.0f} batches: {speed_up:.2f}x"
    )
    pays = speed_up >= MIN_SPEED_UP
    return HotCost(pays=pays, reason=facts, expected_speed_up=float(speed_up), sessions=sessions)


def _mean(values: npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _sync_bytes(
    schema: Schema,
    sampled: Mapping[str, SampledRows],
    hot_N: npt.NDArray[np.int64],
    topology: Topology,
    batch_size: int,
) -> float:
    """Bytes that one rank sends per hot batch: gradients of its distinct rows, to every other rank."""
    local = max(1, batch_size // topology.world_size)
    taken = hot_N[:local]
    if not len(taken):
        return 0.0
    total = 0.0
    for table in schema.tables:
        own = sampled[table.name]
        ids = np.concatenate([own.values[own.offsets[n] : own.offsets[n + 1]] for n in taken.tolist()])
        distinct = len(np.unique(ids))
        total += distinct * (ID_BYTES + WEIGHT_BYTES * table.dim)
    return total * (topology.world_size - 1) * (local / len(taken))
