"""Days that stand out: without events, with few of them, or with another label rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from math import sqrt
from typing import Any

import numpy as np
import pyarrow as pa

from recmill.artifacts import InputError
from recmill.data.checks.findings import MAX_EXAMPLES, LogFinding
from recmill.data.sources.lists import numbers_of

FEW = 0.01  # of the median day's events
DEVIATIONS = 5.0  # standard deviations of a day's rate from that of all days, ...
FACTOR = 1.5  # ... if it also is so many times higher or lower
MAX_DAYS = 400  # in the list for the report, the last ones


def check_days(by_day: pa.Table, labels: Mapping[str, str]) -> tuple[list[LogFinding], tuple[Mapping[str, Any], ...]]:
    """Findings about the days of `by_day` (day, num_events and label sums in order), and the days for the report.

    `labels` maps the columns of sums to the names of the labels.
    """
    day, num = numbers_of(by_day["day"]), numbers_of(by_day["num_events"])
    # DuckDB adds up whole numbers to 128 bits, which arrive as decimals.
    rates = {name: numbers_of(by_day[column].cast(pa.float64())) / num for column, name in labels.items()}
    found = [*_missing(day), *_small(day, num)]
    for name, rate in rates.items():
        found += _unusual(day, num, rate, name)
    days = tuple(
        {"day": shown_day(day[n]), "num_events": int(num[n]), **{name: float(rate[n]) for name, rate in rates.items()}}
        for n in range(max(0, len(day) - MAX_DAYS), len(day))
    )
    return found, days


def shown_day(day: int) -> str:
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(day)):%Y-%m-%d}"


def refuse_empty_days(by_day: pa.Table, *, log_yaml: str, path: str) -> None:
    """Raise if a day between the first and the last has no events: usually a file that is missing or empty."""
    day = numbers_of(by_day["day"])
    if num := int((np.diff(day) - 1).sum()):
        first = shown_day(day[int(np.argmax(np.diff(day) > 1))] + 1)
        what = f"day {first} has no events" if num == 1 else f"{num:,} days have no events, the first is {first}"
        raise InputError(
            f"{log_yaml}: events.time: {what}, but {path} goes from {shown_day(day[0])} to {shown_day(day[-1])}; add "
            "what is missing, or allow it with checks: {empty_days: allow}"
        )


def _missing(day: np.ndarray) -> Iterator[LogFinding]:
    gaps = np.diff(day) - 1
    num_missing = int(gaps.sum())
    if not num_missing:
        return
    first = [shown_day(day[n] + 1) for n in np.flatnonzero(gaps)]
    yield LogFinding(
        check="days",
        level="info",  # what log.yaml does not allow is refused before (refuse_empty_days)
        subject="time",
        message=f"{num_missing:,} of {int(day[-1] - day[0]) + 1:,} days have no events, the first from {first[0]}",
        numbers={"num_empty_days": num_missing},
        examples=tuple({"empty from": start} for start in first[:MAX_EXAMPLES]),
    )


def _small(day: np.ndarray, num: np.ndarray) -> Iterator[LogFinding]:
    median = float(np.median(num))
    small = np.flatnonzero(num[1:-1] < FEW * median) + 1  # a log may begin and end in the middle of a day
    if not len(small):
        return
    total = int(num[small].sum())
    what = "1 day has" if len(small) == 1 else f"{len(small):,} days have"
    yield LogFinding(
        check="days",
        level="warning",
        subject="time",
        message=f"{what} fewer than {FEW:.0%} of a median day's {median:,.0f} events, {total:,} in all: wrong times?",
        numbers={"num_small_days": len(small), "num_events": total},
        examples=tuple({"day": shown_day(day[n]), "events": int(num[n])} for n in small[:MAX_EXAMPLES]),
    )


def _unusual(day: np.ndarray, num: np.ndarray, rate: np.ndarray, label: str) -> Iterator[LogFinding]:
    """Days whose rate chance does not explain, compared with all events."""
    mean = float((rate * num).sum() / num.sum())
    if not 0 < mean < 1:
        return
    noise = DEVIATIONS * sqrt(mean * (1 - mean)) / np.sqrt(num)
    is_far = (np.abs(rate - mean) > noise) & ((rate > FACTOR * mean) | (rate < mean / FACTOR))
    far = np.flatnonzero(is_far)
    if not len(far):
        return
    worst = far[np.argsort(-np.abs(rate[far] - mean) / noise[far], kind="stable")]
    top = worst[0]
    what = "1 day has" if len(far) == 1 else f"{len(far):,} days have"
    yield LogFinding(
        check="days",
        level="warning",
        subject=label,
        message=f"{what} an unusual rate of {label!r}: {rate[top]:.2%} on {shown_day(day[top])}, "
        f"{mean:.2%} over all days",
        numbers={"num_unusual_days": len(far), "rate": mean},
        examples=tuple(
            {"day": shown_day(day[n]), "events": int(num[n]), label: round(float(rate[n]), 4)}
            for n in worst[:MAX_EXAMPLES]
        ),
    )
