"""Maps values to positions on a chart and chooses the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps [low, high] to [start, end], linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __post_init__(self) -> None:
        assert self.low < self.high, f"an axis needs low < high, got [{self.low}, {self.high}]"
        assert not self.is_log or self.low > 0, "a logarithmic axis must start above zero"

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values within the axis."""
        return log_ticks(self.low, self.high, count) if self.is_log else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]."""
    step = round_step((high - low) / max(count, 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Twelve digits are more than an axis shows and remove rounding noise such as that of 3 * 0.1.
    return [float(f"{position * step:.12g}") for position in range(first, last + 1)]


def round_step(width: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten: fewer where the range is large, with 2 and 5 in between where it is small."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        values = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    else:
        values = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / count)))]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def padded_range(values: Iterable[float], *, share: float = 0.06) -> tuple[float, float]:
    """The range of the values plus a margin; never empty."""
    found = list(values)
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    air = (high - low) * share or abs(high) * share or 1.0
    return low - air, high + air
