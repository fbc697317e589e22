"""Progress of long-running work."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# progress(what, done, total): `what` names the work, `total` is 0 if unknown.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Print nothing."""


def describe(what: str, done: int, total: int) -> str:
    return f"{what}: {done:,} of {total:,} ({done / total:.0%})" if total else f"{what}: {done:,}"


def terminal_progress(*, live: tuple[str, ...] = (), lines: tuple[str, ...] = ()) -> Progress:
    """Progress on standard error: one rewritten line on a terminal, one line every 5 s in a log.

    Work whose name begins with one of `live` is only shown where its line can be rewritten, and work whose name begins
    with one of `lines` gets a line of its own at every call.
    """
    is_terminal = sys.stderr.isatty()
    interval_s = 0.5 if is_terminal else 5.0
    shown: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_live = what.startswith(live)
        stays = what.startswith(lines) or (0 < total <= done and not is_live)
        if (is_live and not is_terminal) or (not stays and now - shown.get(what, -interval_s) < interval_s):
            return
        shown[what] = now
        line = f"  {describe(what, done, total)}"
        if is_terminal:
            sys.stderr.write(f"\r{line:<78}" + ("\n" if stays else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return show


def seconds_since_start(pid: int | None = None) -> float:
    """The age of a process, by default of this one.

    psutil adds the time of boot, which the kernel cuts to whole seconds: processes seem up to a second older.
    """
    stat = Path(f"/proc/{pid or 'self'}/stat").read_text(encoding="utf-8", errors="replace")
    started_ticks = int(
        stat.rpartition(")")[2].split()[19]
    )  # since boot; field 22 of proc(5), the name may hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
