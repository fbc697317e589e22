"""How long work tells a person where it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# progress(what, done, total): `what` names the work, `total` is 0 where it is not known.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Say nothing."""


def terminal_progress(min_interval_s: float = 0.5) -> Progress:
    """Progress on standard error: one line that is rewritten on a terminal, a line every few seconds in a log."""
    is_terminal = sys.stderr.isatty()
    interval_s = min_interval_s if is_terminal else max(min_interval_s, 5.0)
    shown: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_last = total > 0 and done >= total
        if not is_last and now - shown.get(what, -interval_s) < interval_s:
            return
        shown[what] = now
        share = f"{done:,} of {total:,} ({done / total:.0%})" if total else f"{done:,}"
        line = f"  {what}: {share}"
        if is_terminal:
            sys.stderr.write(f"\r{line:<78}" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return show
