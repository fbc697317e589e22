"""Sizes in bytes as text, and text as sizes in bytes."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float) -> str:
    """Bytes in powers of 1024 with three significant digits: '12 B', '1.5 MiB', '1.86 GiB'."""
    power = 0
    while abs(num_bytes) >= 1023.5 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    decimals = 2 if abs(num_bytes) < 9.995 else 1 if abs(num_bytes) < 99.95 else 0
    text = f"{num_bytes:,.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Bytes from '64MiB', '2GB', '512'; decimal and binary units are kept apart. ValueError for anything else."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {unit.lower(): 1024**power for power, unit in enumerate(UNITS)}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size; write it like 64MiB or 2GB") from None
    if size <= 0:
        raise ValueError(f"{text!r} must be more than zero")
    return int(size)
