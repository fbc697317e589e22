"""Numbers as readable text: counts, rates, sizes, times, shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from recmill import sizes

NBSP = "\u00a0"  # keeps a number and its unit on one line
DASH = "–"  # shown where nothing was measured


def format_number(value: float) -> str:
    """At least three significant digits, thousands separators, no exponent for values that fit on an axis."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude < 10**-4 or magnitude >= 10**15:
        return f"{value:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(magnitude)))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else format_number(value)


def format_compact(value: float) -> str:
    """1,234,567 as 1.23 M: three digits and a unit prefix."""
    for power, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        # 999,950 is 1 M and not 1,000 k: compare after rounding to three digits.
        if abs(value) >= power * 0.9995:
            return f"{format_number(value / power)}{NBSP}{suffix}"
    return format_number(value)


def format_bytes(value: float) -> str:
    return sizes.format_bytes(value).replace(" ", NBSP)


def format_seconds(value: float) -> str:
    if value < 0.001:
        return f"{format_number(value * 10**6)}{NBSP}µs" if value else f"0{NBSP}s"
    if value < 1:
        return f"{format_number(value * 1000)}{NBSP}ms"
    if value < 60:
        return f"{format_number(value)}{NBSP}s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {seconds}{NBSP}s" if seconds else f"{minutes}{NBSP}min"
    return f"{minutes // 60}{NBSP}h {minutes % 60}{NBSP}min"


def format_share(value: float) -> str:
    """0.1234 as 12.3%."""
    percent = value * 100
    return f"{percent:.0f}%" if abs(percent - round(percent)) < 0.005 else f"{percent:.1f}%"


def format_metric(value: float) -> str:
    """A quality metric with four decimals, as AUC and log loss are usually reported."""
    return f"{value:.4f}"


def format_rate(value: float) -> str:
    return f"{format_compact(value)}/s"


def format_ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{format_number(value)}×"


# Names of sizes end in their unit, so values can be formatted by name alone.
_SUFFIXES: tuple[tuple[tuple[str, ...], Callable[[float], str]], ...] = (
    (("bytes_per_s",), lambda value: f"{format_bytes(value)}/s"),
    (("_per_s",), format_rate),
    (("bytes",), format_bytes),
    (("_s", "seconds"), format_seconds),
    (("share", "_fraction", "_fill"), format_share),
    (("auc", "loss", "entropy"), format_metric),
)


def format_named(name: str, value: Any) -> str:
    """A value formatted by its name: `peak_memory_bytes` as a size, `seconds` as a time, others as they are."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            return DASH
        for endings, format_value in _SUFFIXES:
            if name.removesuffix("_per_step").removesuffix("_per_item").endswith(endings):
                return format_value(value)
        return format_count(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(format_named(name, item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_named(str(key), item)}" for key, item in value.items()) or "none"
    return str(value)


def readable_name(name: str) -> str:
    """`peak_memory_bytes` as "Peak memory": the unit is part of the value."""
    acronyms = {"auc": "AUC", "mlflow": "MLflow", "kfp": "KFP", "cpu": "CPU", "id": "ID", "uri": "URI", "url": "URL"}
    text = "bytes_per_rank" if name == "rank_bytes" else name
    for ending, kept in (
        ("_bytes_per_s", " bandwidth"),
        ("_per_s", "/s"),
        ("_bytes", ""),
        ("_per_step", " per step"),
        ("_s", ""),
    ):
        if text.endswith(ending) and text != ending.strip("_"):
            text = text.removesuffix(ending) + kept
            break
    words = [acronyms.get(word, word) for word in text.replace("num_", "").split("_") if word]
    sentence = " ".join(words)
    return sentence[:1].upper() + sentence[1:] if sentence else name


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table for a terminal: a header, a rule, and rows with right-aligned numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
