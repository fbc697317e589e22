"""How much memory ingestion may use, and how much it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kernels.recycled import release_idle
from recmill.artifacts import InputError
from recmill.data.ingest.order import MAX_PARTS, EpochPlan, Order

MAX_DEFAULT_LIMIT_BYTES = 4 * 2**30  # more read-ahead than this brings no speed
GUARD_INTERVAL_S = 0.5
RESERVE_BYTES = 256 * 2**20  # reading ahead pauses while the machine has less left
MIXED_BYTES = 256 * 2**20  # limit of ids and values that all lanes together hold to mix row groups
CGROUP_FILES = (  # version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process can still allocate: the machine's free memory, or less if a control group limits it."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(cgroup_root)])


def control_groups(root: Path) -> list[Path]:
    """The folders of the control groups of this process, its own first."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    names = [line.split(":", 2)[2].strip("/") for line in lines if line.startswith("0::")] or [""]
    folders = [root / names[0], *(root / names[0]).parents]
    return [folder for folder in folders if folder.is_relative_to(root)]


def _cgroup_headrooms(root: Path) -> list[int]:
    """Limit minus usage of every control group of this process."""
    headrooms = []
    for folder in control_groups(root):
        for limit_name, used_name in CGROUP_FILES:
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and used is not None:
                # The page cache counts as used but is dropped when memory is needed.
                headrooms.append(max(0, limit - used + _cached_bytes((folder / limit_name).parent / "memory.stat")))
    return headrooms


def _read_number(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None  # "max" means no limit


def _cached_bytes(path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = dict(line.split()[:2] for line in lines)
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


def default_memory_limit(world_size: int = 1, *, free_bytes: int | None = None) -> int:
    """Half of the free memory, shared by the ranks; the other half is for the trainer."""
    free_bytes = available_memory_bytes() if free_bytes is None else free_bytes
    return min(MAX_DEFAULT_LIMIT_BYTES, free_bytes // (2 * world_size))


class MemoryGuard:
    """Tells when the machine itself runs short of memory, whatever our own accounting says."""

    def __init__(self, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.reserve_bytes = reserve_bytes
        self._checked_at = -GUARD_INTERVAL_S
        self._is_short = False
        self.num_pauses = 0  # checks that found the machine short of memory

    def is_short(self) -> bool:
        now = time.monotonic()
        if now - self._checked_at >= GUARD_INTERVAL_S:
            self._checked_at, self._is_short = now, available_memory_bytes() < self.reserve_bytes
            if self._is_short:
                release_idle()
            self.num_pauses += self._is_short
        return self._is_short


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Memory charged for a row group: its peak while in progress, and what it keeps once it is transformed.

    `value_bytes` counts its ids and values alone, independent of how they are read.
    """

    admitted_bytes: int
    settled_bytes: int
    value_bytes: int = 0


def choose_parts(charges: Sequence[Charge], num_lanes: int) -> int:
    """Number of parts per lane. It depends on the data alone, so batches depend neither on the limit nor on dedup."""
    lanes_bytes = num_lanes * max((charge.value_bytes for charge in charges), default=0)
    num_parts = MAX_PARTS
    while num_parts > 1 and num_parts * lanes_bytes > MIXED_BYTES:
        num_parts //= 2
    return num_parts


def peak_live_bytes(plan: EpochPlan, charges: Sequence[Charge]) -> int:
    """The budget that is enough to cut every batch of the plan.

    All other row groups of a batch settle before its last one is admitted, so they count as settled and one as
    admitted.
    """
    if not plan.items:
        return 0
    begins = [(item.first_batch, 1, charges[item.group].settled_bytes) for item in plan.items]
    ends = [(item.last_batch + 1, 0, -charges[item.group].settled_bytes) for item in plan.items]
    peak = live = 0
    for _, _, change in sorted(begins + ends):
        live += change
        peak = max(peak, live)
    return peak + max(_decoding_bytes(charges[item.group]) for item in plan.items)


def live_bytes_bound(order: Order, charges: Sequence[Charge]) -> int:
    """Upper bound of `peak_live_bytes` over all epochs and permutations.

    The row groups that the run of one part touches have at most its rows plus two row groups, and each boundary between
    parts may keep one shared row group alive.
    """
    num_parts = order.num_own_lanes * order.num_parts
    touched_rows = order.num_parts * order.batch_size + 2 * num_parts * max(order.group_rows)
    shared_bytes = num_parts * max(charge.settled_bytes for charge in charges)
    touched_bytes = int(touched_rows * _row_bytes(order, charges)) + shared_bytes
    all_bytes = sum(charge.settled_bytes for charge in charges)
    return min(all_bytes, touched_bytes) + max(_decoding_bytes(charge) for charge in charges)


def _decoding_bytes(charge: Charge) -> int:
    return charge.admitted_bytes - charge.settled_bytes


def _row_bytes(order: Order, charges: Sequence[Charge]) -> float:
    """Bytes per row of the row group with the widest rows."""
    return max(charge.settled_bytes / rows for charge, rows in zip(charges, order.group_rows, strict=True))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How the limit is divided between row groups in progress and batches that wait for the trainer."""

    limit_bytes: int
    item_bytes: int  # admission of row groups stops here
    least_bytes: int = 0  # the minimum: one batch and the row groups it is cut from


def split_budget(order: Order, charges: Sequence[Charge], *, limit_bytes: int, prefetch: int, epochs: range) -> Budget:
    """Divide the limit, or raise if one batch and the row groups it is cut from do not fit."""
    own_rows = min(order.num_rows, -(-order.batch_size // order.world_size))
    batch_bytes = int(own_rows * _row_bytes(order, charges))  # an upper bound, of this rank's share
    live_bytes = live_bytes_bound(order, charges)
    if live_bytes + prefetch * batch_bytes > limit_bytes:
        # Of two plans, the smaller peak: holding a row group for all of its lanes, or reading it again for each.
        live_bytes = max(
            min(peak_live_bytes(order.plan(epoch, share_items=shared), charges) for shared in (True, False))
            for epoch in epochs
        )
    if live_bytes + batch_bytes > limit_bytes:
        raise InputError(
            f"the memory limit of {limit_bytes:,} bytes is too small: one batch of {order.batch_size:,} rows and the "
            f"row groups it is cut from take {live_bytes + batch_bytes:,} bytes"
        )
    reserved_bytes = min(prefetch * batch_bytes, limit_bytes - live_bytes)
    return Budget(
        limit_bytes=limit_bytes, item_bytes=limit_bytes - reserved_bytes, least_bytes=live_bytes + batch_bytes
    )
