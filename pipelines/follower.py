"""Live progress of a run, one line per step with rate and time left: in place on a terminal, else every few seconds.

[5/8] train_model     train step 80 of 126 ████████████▌        64%   21/s   2 s left   0:41
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recmill.report.units import format_number

COUNTED = re.compile(r"(?P<what>.+): (?P<done>[\d,]+) of (?P<total>[\d,]+) \(\d+%\)")
TICK_S = 0.25  # between two redraws of the line on a terminal
QUIET_S = 5.0  # between two lines without a terminal
MIN_RATE_S = 1.0  # of counting before a rate is believed
BAR_WIDTH = 16
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(kw_only=True)
class Work:
    """What a step is counting: since when, from where, and how far it is."""

    what: str
    began: float
    counted_at: float  # when `done` was last told
    first: int
    done: int
    total: int

    def describe(self, now: float, *, has_bar: bool) -> str:
        """`train step 80 of 126 (64%), 21/s, 2 s left`; rate and time left once they are known."""
        share = self.done / self.total if self.total else 1.0
        seconds, counted = self.counted_at - self.began, self.done - self.first
        known = []
        if seconds >= MIN_RATE_S and counted > 0:
            rate = counted / seconds
            known = [f"{format_number(rate)}/s"]
            if self.done < self.total:
                left = (self.total - self.done) / rate - (now - self.counted_at)
                known.append(f"{format_clock(max(left, 0.0))} left")
        bar = f"{draw_bar(share)} " if has_bar else ""
        return "  ".join([f"{self.what} {self.done:,} of {self.total:,}  {bar}{share:.0%}", *known])


def draw_bar(share: float) -> str:
    eighths = int(min(max(share, 0.0), 1.0) * BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if full < BAR_WIDTH else "")).ljust(BAR_WIDTH)


def format_clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(kw_only=True)
class Follower:
    """Shows the running step on standard error. Use as a context: on a terminal a thread keeps the clock going."""

    steps: tuple[str, ...]
    is_silent: bool = False
    clock: Callable[[], float] = time.monotonic
    is_terminal: bool = field(default_factory=lambda: sys.stderr.isatty())

    def __post_init__(self) -> None:
        self.began = self.shown = self.clock()
        self.num_started = 0
        self.step = ""
        self.work: Work | None = None
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Follower:
        if self.is_terminal and not self.is_silent:
            self.thread = threading.Thread(target=self._tick, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        if self.thread:
            self.thread.join()
            sys.stderr.write("\n" if self.step else "\r\x1b[K")  # the line of a step that was interrupted stays
            sys.stderr.flush()

    def __call__(self, step: str, text: str) -> None:
        if self.is_silent:
            return
        with self.lock:
            if text == "started":
                self.num_started += 1  # kfp may reorder independent steps
                self.step, self.work, self.shown = step, None, self.clock()
                self._show(f"{self._place(step)} ...")
            elif text.startswith("done in"):
                self._finish(f"{self._place(step)} {text}")
            elif text.startswith(("error: ", "failed: ")):
                self._finish(f"{self._place(step)} failed")
            else:
                self._count(text)
                if not self.is_terminal and self.clock() - self.shown >= QUIET_S:
                    self.shown = self.clock()
                    self._show(self._line(text))

    def _count(self, text: str) -> None:
        found = COUNTED.fullmatch(text)
        if not found:
            self.work = None
            return
        done, total = (int(found[name].replace(",", "")) for name in ("done", "total"))
        if self.work is None or self.work.what != found["what"] or done < self.work.done:
            now = self.clock()
            self.work = Work(what=found["what"], began=now, counted_at=now, first=done, done=done, total=total)
        self.work.done, self.work.total, self.work.counted_at = done, total, self.clock()

    def _tick(self) -> None:
        while not self.stopped.wait(TICK_S):
            with self.lock:
                if self.step or self.num_started < len(self.steps):
                    self._show(self._line(""))

    def _line(self, text: str) -> str:
        now = self.clock()
        if not self.step:
            return f"[{self.num_started + 1}/{len(self.steps)}] starting  {format_clock(now - self.began)}"
        told = self.work.describe(now, has_bar=self.is_terminal) if self.work else text or "..."
        return f"{self._place(self.step)} {told}  {format_clock(now - self.began)}"

    def _place(self, step: str) -> str:
        width = max(map(len, self.steps))
        return f"[{self.num_started}/{len(self.steps)}] {step:<{width}}"

    def _show(self, line: str) -> None:
        if self.is_terminal:
            width = shutil.get_terminal_size((110, 24)).columns - 1
            sys.stderr.write(f"\r\x1b[K{line[:width]}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _finish(self, line: str) -> None:
        self._show(line)
        self.step = ""
        if self.is_terminal:
            sys.stderr.write("\n")
