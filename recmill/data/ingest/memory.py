"""How much memory ingestion may take, and how much it will need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from recmill.artifacts import InputError
from recmill.data.ingest.order import MAX_PARTS, EpochPlan, Order

MAX_DEFAULT_LIMIT_BYTES = 4 * 2**30  # beyond this, more read-ahead buys nothing
GUARD_INTERVAL_S = 0.5
RESERVE_BYTES = 256 * 2**20  # reading ahead pauses while the machine has less left
MIXED_BYTES = 256 * 2**20  # ids and values of the row groups that all lanes together may hold to mix them
CGROUP_FILES = (  # version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process can still allocate: the machine's free memory or what its control groups leave, if less."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(cgroup_root)])


def control_groups(root: Path) -> list[Path]:
    """The folders of the control groups that this process is in, its own first."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    names = [line.split(":", 2)[2].strip("/") for line in lines if line.startswith("0::")] or [""]
    folders = [root / names[0], *(root / names[0]).parents]
    return [folder for folder in folders if folder.is_relative_to(root)]


def _cgroup_headrooms(root: Path) -> list[int]:
    """Limit less use of every control group that this process is in."""
    headrooms = []
    for folder in control_groups(root):
        for limit_name, used_name in CGROUP_FILES:
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and used is not None:
                # The page cache counts as used but gives way to an allocation.
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
    """Half of what is free, shared by the ranks; the other half is the trainer's."""
    free_bytes = available_memory_bytes() if free_bytes is None else free_bytes
    return min(MAX_DEFAULT_LIMIT_BYTES, free_bytes // (2 * world_size))


class MemoryGuard:
    """Says when the machine itself runs short, whatever our own books say."""

    def __init__(self, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.reserve_bytes = reserve_bytes
        self._checked_at = -GUARD_INTERVAL_S
        self._is_short = False
        self.num_pauses = 0  # times that the machine was found to be short

    def is_short(self) -> bool:
        now = time.monotonic()
        if now - self._checked_at >= GUARD_INTERVAL_S:
            self._checked_at, self._is_short = now, available_memory_bytes() < self.reserve_bytes
            self.num_pauses += self._is_short
        return self._is_short


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What a row group is charged: the most it takes on its way, and what it keeps once it is transformed.

    `value_bytes` are its ids and values alone, however they are read.
    """

    admitted_bytes: int
    settled_bytes: int
    value_bytes: int = 0


def choose_parts(charges: Sequence[Charge], num_lanes: int) -> int:
    """Into how many parts a lane is cut. The data alone decide: batches depend neither on the limit nor on dedup."""
    lanes_bytes = num_lanes * max((charge.value_bytes for charge in charges), default=0)
    num_parts = MAX_PARTS
    while num_parts > 1 and num_parts * lanes_bytes > MIXED_BYTES:
        num_parts //= 2
    return num_parts


def peak_live_bytes(plan: EpochPlan, charges: Sequence[Charge]) -> int:
    """The budget with which every batch of the plan can be cut.

    Before a batch's last row group is admitted all its others settle, whatever else happens; so they count as settled,
    and one more as it is when it is admitted.
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
    """What `peak_live_bytes` cannot exceed in any epoch, however the row groups are permuted.

    The groups that the run of one part touches have at most its rows and two row groups more; and each boundary
    between parts may keep one shared row group alive.
    """
    num_parts = order.num_own_lanes * order.num_parts
    touched_rows = order.num_parts * order.batch_size + 2 * num_parts * max(order.group_rows)
    shared_bytes = num_parts * max(charge.settled_bytes for charge in charges)
    touched_bytes = int(touched_rows * _row_bytes(order, charges)) + shared_bytes
    all_bytes = sum(charge.settled_bytes for charge in charges)
    return min(all_bytes, touched_bytes) + max(_decoding_bytes(charge) for charge in charges)


def _least_live_bytes(order: Order, charges: Sequence[Charge], epoch: int) -> int:
    """A row group is held for all of its lanes or read again for each, whatever takes less."""
    return min(peak_live_bytes(order.plan(epoch, share_items=shared), charges) for shared in (True, False))


def _decoding_bytes(charge: Charge) -> int:
    return charge.admitted_bytes - charge.settled_bytes


def _row_bytes(order: Order, charges: Sequence[Charge]) -> float:
    """Bytes of a row in the row group that has the widest ones."""
    return max(charge.settled_bytes / rows for charge, rows in zip(charges, order.group_rows, strict=True))


def _batch_bytes(order: Order, charges: Sequence[Charge]) -> int:
    """The most that this rank's share of a batch takes."""
    own_rows = min(order.num_rows, -(-order.batch_size // order.world_size))
    return int(own_rows * _row_bytes(order, charges))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How the limit is shared out: row groups on their way, and batches that wait for the trainer."""

    limit_bytes: int
    item_bytes: int  # admission of row groups stops here
    least_bytes: int = 0  # one batch and the row groups it is cut from: less cannot work


def split_budget(order: Order, charges: Sequence[Charge], *, limit_bytes: int, prefetch: int, epochs: range) -> Budget:
    """Share the limit out, or raise if not even one batch and the row groups it is cut from fit."""
    batch_bytes = _batch_bytes(order, charges)
    live_bytes = live_bytes_bound(order, charges)
    if live_bytes + prefetch * batch_bytes > limit_bytes:
        live_bytes = max(_least_live_bytes(order, charges, epoch) for epoch in epochs)
    if live_bytes + batch_bytes > limit_bytes:
        raise InputError(
            f"the memory limit of {limit_bytes:,} bytes is too small: one batch of {order.batch_size:,} rows and the "
            f"row groups it is cut from take {live_bytes + batch_bytes:,} bytes"
        )
    reserved_bytes = min(prefetch * batch_bytes, limit_bytes - live_bytes)
    return Budget(
        limit_bytes=limit_bytes, item_bytes=limit_bytes - reserved_bytes, least_bytes=live_bytes + batch_bytes
    )
