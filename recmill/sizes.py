"""Sizes in bytes as text."""

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
