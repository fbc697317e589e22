"""Sizes as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Bytes in powers of 1024: '12 B', '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
