"""The order of work over all epochs: row groups numbered in order of admission, batches in order of delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from recmill.artifacts import InputError
from recmill.data.ingest.memory import Budget, Charge, peak_live_bytes
from recmill.data.ingest.order import EpochPlan, Order, global_batch_rows
from recmill.data.ingest.splits import StoredGroup


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row group to read: its place in the sequence and the last batch that uses it."""

    sequence: int
    group: StoredGroup
    charge: Charge
    last_batch: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a batch is cut: rows [start, stop) of the entries with these sequence numbers."""

    batch: int
    slices: list[tuple[int, int, int]]
    num_global: int


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    number: int
    first_sequence: int
    plan: EpochPlan
    live_bytes: int


class Schedule:
    """Plans epochs one after another, on demand. Not thread-safe: the runner calls it under its lock."""

    def __init__(
        self, order: Order, groups: Sequence[StoredGroup], charges: Sequence[Charge], *, budget: Budget, batches: range
    ) -> None:
        self.order = order
        self.batches = batches  # numbers of the batches to deliver, counted over all epochs
        self._groups = groups
        self._charges = charges
        self._budget = budget
        self._epochs: deque[_Epoch] = deque()

    def entry(self, sequence: int) -> Entry | None:
        """The row group with this number, or None after the last."""
        while not self._epochs or sequence >= self._next_sequence():
            if not self._plan_next():
                return None
        epoch = next(epoch for epoch in reversed(self._epochs) if epoch.first_sequence <= sequence)
        item = epoch.plan.items[sequence - epoch.first_sequence]
        first_of_epoch = epoch.number * self.order.batches_per_epoch
        return Entry(
            sequence=sequence,
            group=self._groups[item.group],
            charge=self._charges[item.group],
            last_batch=first_of_epoch + item.last_batch,
        )

    def num_needed(self, batch: int) -> int:
        """How many row groups, from the first on, must be ready before this batch can be cut."""
        epoch = self._epoch_of(batch)
        return epoch.first_sequence + epoch.plan.num_needed(batch % self.order.batches_per_epoch)

    def cut(self, batch: int) -> Cut:
        epoch, position = self._epoch_of(batch), batch % self.order.batches_per_epoch
        return Cut(
            batch=batch,
            slices=[(epoch.first_sequence + item, start, stop) for item, start, stop in epoch.plan.slices(position)],
            num_global=global_batch_rows(position, num_rows=self.order.num_rows, batch_size=self.order.batch_size),
        )

    def forget(self, batch: int) -> None:
        """Drop the plans of epochs before this batch's."""
        while len(self._epochs) > 1 and self._epochs[0].number < batch // self.order.batches_per_epoch:
            self._epochs.popleft()

    def _epoch_of(self, batch: int) -> _Epoch:
        number = batch // self.order.batches_per_epoch
        while not self._epochs or self._epochs[-1].number < number:
            self._plan_next()
        return next(epoch for epoch in self._epochs if epoch.number == number)

    def _next_sequence(self) -> int:
        return self._epochs[-1].first_sequence + len(self._epochs[-1].plan.items)

    def _plan_next(self) -> bool:
        per_epoch = self.order.batches_per_epoch
        number = self._epochs[-1].number + 1 if self._epochs else self.batches.start // per_epoch
        if number * per_epoch >= self.batches.stop:
            return False
        first_batch = max(0, self.batches.start - number * per_epoch)
        first_sequence = self._next_sequence() if self._epochs else 0
        plan, live_bytes = self._plan(number, first_batch)
        self._epochs.append(_Epoch(number=number, first_sequence=first_sequence, plan=plan, live_bytes=live_bytes))
        return True

    def _plan(self, number: int, first_batch: int) -> tuple[EpochPlan, int]:
        shared = self.order.plan(number, first_batch=first_batch)
        live_bytes = peak_live_bytes(shared, self._charges)
        if live_bytes <= self._budget.item_bytes:
            return shared, live_bytes
        plan = self.order.plan(number, first_batch=first_batch, share_items=False)
        live_bytes = peak_live_bytes(plan, self._charges)
        if live_bytes > self._budget.item_bytes:
            raise InputError(
                f"the memory limit of {self._budget.limit_bytes:,} bytes is too small for epoch {number}: "
                f"the row groups of one batch take {live_bytes:,} bytes at the same time"
            )
        return plan, live_bytes

    def set_budget(self, budget: Budget) -> None:
        """Plan later epochs for another budget; those already planned keep what they need."""
        self._budget = budget

    @property
    def item_bytes(self) -> int:
        """The budget for row groups, never less than a planned epoch needs."""
        return max([self._budget.item_bytes, *(epoch.live_bytes for epoch in self._epochs)])
