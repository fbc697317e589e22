"""The order in which hot and cold batches are trained, adapted to the held-out loss.

A rate of r means: train r of an epoch's hot batches, then r of its cold ones, and so on in turns. An epoch has about
1/r turns, and each turn swaps the hot rows in and out. Long runs of one kind drift away from what the other teaches:

    held-out loss rose         rate / 2      shorter runs, more swaps
    fell several times         rate * 2      longer runs, fewer swaps
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from recmill.artifacts import InputError

MIN_RATE, MAX_RATE = 0.01, 1.0
START_RATE = 0.5
FALLS_TO_DOUBLE = 3


@dataclass(frozen=True, kw_only=True)
class BatchBlock:
    """Batches of one kind in a row: numbers [start, start + count) of the epoch's hot or cold batches."""

    is_hot: bool
    start: int
    count: int


@dataclass(kw_only=True)
class HotSchedule:
    """Returns the blocks of an epoch one after another, and adapts the rate to the held-out losses.

        schedule = HotSchedule(num_hot=800, num_cold=200)
        while (block := schedule.next_block()) is not None:
            ...                                  # train the block
            if schedule.is_turn_over:
                schedule.observe(held_out_loss)  # the same on all ranks

    Its fields are its state: a few numbers, equal on all ranks because the loss is: `observe` takes rank 0's.
    """

    num_hot: int
    num_cold: int
    rate: float = START_RATE
    epoch: int = 0
    hot_done: int = 0
    cold_done: int = 0
    is_hot_next: bool = True
    num_swaps: int = 0  # how often the hot rows were swapped in or out so far
    num_falls: int = 0
    last_loss: float | None = None

    def __post_init__(self) -> None:
        assert min(self.num_hot, self.num_cold) >= 0
        assert MIN_RATE <= self.rate <= MAX_RATE

    @property
    def num_turns(self) -> int:
        """Turns per epoch at the present rate."""
        return max(1, min(round(1 / self.rate), self.num_cold, self.num_hot))

    @property
    def is_turn_over(self) -> bool:
        """Whether the last block ended a turn: then the held-out loss is due."""
        is_cold_done = self.is_hot_next and (self.hot_done + self.cold_done) > 0
        return is_cold_done or self.is_epoch_over

    @property
    def is_epoch_over(self) -> bool:
        return self.hot_done >= self.num_hot and self.cold_done >= self.num_cold

    def next_block(self) -> BatchBlock | None:
        """The next batches to train, or None at the end of the epoch (then `start_epoch` begins another)."""
        if self.is_epoch_over:
            return None
        is_hot = (self.is_hot_next and self.hot_done < self.num_hot) or self.cold_done >= self.num_cold
        done = self.hot_done if is_hot else self.cold_done
        count = self._turn_of_hot() if is_hot else self._turn_of_cold()
        if is_hot:
            self.hot_done += count
            self.num_swaps += 2
        else:
            self.cold_done += count
        self.is_hot_next = not is_hot
        return BatchBlock(is_hot=is_hot, start=done, count=count)

    def _turn_of_hot(self) -> int:
        """Hot batches of this turn: at least so many that a cold one is due.

        There are at most as many turns as batches of the rarer kind, and every turn has a cold batch.
        """
        left, fewest = self.num_hot - self.hot_done, min(self.num_hot, self.num_cold)
        if self.cold_done >= self.num_cold:
            return left
        due = math.ceil(self.num_hot * (self.cold_done + 0.5) / self.num_cold) - self.hot_done
        return min(left, max(1, due, _round(max(self.rate, 1 / fewest) * self.num_hot)))

    def _turn_of_cold(self) -> int:
        """Cold batches until the same share of both kinds is trained, so that both end together."""
        left = self.num_cold - self.cold_done
        if self.hot_done >= self.num_hot:
            return left
        return min(left, max(1, _round(self.num_cold * self.hot_done / self.num_hot) - self.cold_done))

    def start_epoch(self) -> None:
        self.hot_done = self.cold_done = 0
        self.is_hot_next = True
        self.epoch += 1

    def observe(self, loss: float) -> float:
        """Take the held-out loss (rank 0's counts) and return the new rate."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            shared = torch.tensor([loss], dtype=torch.float64)
            dist.broadcast(shared, src=0)
            loss = float(shared)
        if self.last_loss is not None:
            if loss > self.last_loss:
                self.rate, self.num_falls = max(MIN_RATE, self.rate / 2), 0
            elif loss < self.last_loss:
                self.num_falls += 1
                if self.num_falls >= FALLS_TO_DOUBLE:
                    self.rate, self.num_falls = min(MAX_RATE, self.rate * 2), 0
        self.last_loss = loss
        return self.rate

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the remaining blocks, as JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the same data."""
        for name, expected in (("num_hot", self.num_hot), ("num_cold", self.num_cold)):
            if state.get(name) != expected:
                raise InputError(f"the saved schedule has {name} {state.get(name)!r}, this run has {expected}")
        for name in asdict(self):
            setattr(self, name, state[name])


def _round(number: float) -> int:
    """Round half up; Python's own rounding makes 2 the half of 5 batches, and 4 the half of 7."""
    return math.floor(number + 0.5)
