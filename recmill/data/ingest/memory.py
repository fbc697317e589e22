"""How much memory ingestion may take, and how much it will need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from recmill.artifacts import InputError
from recmill.data.ingest.order import EpochPlan, Order

MAX_DEFAULT_LIMIT_BYTES = 4 * 2**30  # beyond this, more read-ahead buys nothing
GUARD_INTERVAL_S = 0.5


def available_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process can still allocate: the machine's free memory or what its control groups leave, if less."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(cgroup_root)])


def _cgroup_headrooms(root: Path) -> list[int]:
    """Limit less use of every control group above this process (version 2, then version 1)."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    names = [line.split(":", 2)[2].strip("/") for line in lines if line.startswith("0::")] or [""]
    folders = [root / names[0], *(root / names[0]).parents]
    headrooms = []
    for folder in [folder for folder in folders if folder.is_relative_to(root)]:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
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
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file"))


def default_memory_limit(world_size: int = 1) -> int:
    """Half of what is free, shared by the ranks; the other half is the trainer's."""
    return min(MAX_DEFAULT_LIMIT_BYTES, available_memory_bytes() // (2 * world_size))


class MemoryGuard:
    """Says when the machine itself runs short, whatever our own books say."""

    def __init__(self, *, reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self._checked_at = -GUARD_INTERVAL_S
        self._is_short = False

    def is_short(self) -> bool:
        now = time.monotonic()
        if now - self._checked_at >= GUARD_INTERVAL_S:
            self._checked_at, self._is_short = now, available_memory_bytes() < self.reserve_bytes
        return self._is_short


def peak_live_bytes(plan: EpochPlan, charges: Sequence[int]) -> int:
    """The most that the items in use at the same batch take together."""
    events = sorted(
        [(item.first_batch, 1, charges[item.group]) for item in plan.items]
        + [(item.last_batch + 1, 0, -charges[item.group]) for item in plan.items]
    )
    peak = live = 0
    for _, _, charge in events:
        live += charge
        peak = max(peak, live)
    return peak


def live_bytes_bound(order: Order, charges: Sequence[int]) -> int:
    """What `peak_live_bytes` cannot exceed in any epoch, however the row groups are permuted.

    The groups that one lane's share of a batch touches have at most its rows and two row groups more; and each
    boundary between lanes may keep one shared row group alive.
    """
    row_bytes = max(charge / rows for charge, rows in zip(charges, order.group_rows, strict=True))
    touched_rows = order.batch_size + 2 * order.num_own_lanes * max(order.group_rows)
    return min(sum(charges), int(touched_rows * row_bytes) + order.num_own_lanes * max(charges))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How the limit is shared out: row groups on their way, and batches that wait for the trainer."""

    limit_bytes: int
    item_bytes: int  # admission of row groups stops here
    required_bytes: int  # the smallest limit this order can run with


def split_budget(order: Order, charges: Sequence[int], *, limit_bytes: int, prefetch: int, epochs: range) -> Budget:
    """Share the limit out, or raise if not even one batch and the row groups it is cut from fit."""
    own_rows = -(-order.batch_size // order.world_size)
    row_bytes = max(charge / rows for charge, rows in zip(charges, order.group_rows, strict=True))
    batch_bytes = int(min(own_rows, order.num_rows) * row_bytes)
    bound = live_bytes_bound(order, charges)
    if bound + prefetch * batch_bytes <= limit_bytes:
        return Budget(
            limit_bytes=limit_bytes, item_bytes=limit_bytes - prefetch * batch_bytes, required_bytes=bound + batch_bytes
        )
    live = max(peak_live_bytes(order.plan(epoch, share_items=False), charges) for epoch in epochs)
    if live + batch_bytes > limit_bytes:
        raise InputError(
            f"the memory limit of {limit_bytes:,} bytes is too small: one batch of {order.batch_size:,} rows and the "
            f"row groups it is cut from take {live + batch_bytes:,} bytes"
        )
    reserved = min(prefetch * batch_bytes, limit_bytes - live)
    return Budget(limit_bytes=limit_bytes, item_bytes=limit_bytes - reserved, required_bytes=live + batch_bytes)
