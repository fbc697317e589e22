"""Progress as people see it, and the age of a process: the time since it was started."""

import io
import subprocess
import sys
import time

import pytest

from recmill.progress import seconds_since_start, terminal_progress

TICK_S = 0.01


def test_a_process_is_as_old_as_the_time_since_its_start():
    code = "from recmill.progress import seconds_since_start as age; print(age(), flush=True); input()"
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        own = float(process.stdout.readline())
        seen = seconds_since_start(process.pid)
        elapsed = time.monotonic() - before
        process.stdin.close()
    assert 0 < own <= seen <= elapsed + 2 * TICK_S


class Screen(io.StringIO):
    """Standard error that is a terminal, or a log."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_training_of_many_is_one_line_and_on_a_terminal_also_a_live_one(monkeypatch, is_terminal):
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    show = terminal_progress(live=("train step",), lines=("trained ",))
    show("train step", 1, 10)
    show("train step", 10, 10)
    show("trained a", 1, 2)
    show("trained b", 2, 2)
    written = screen.getvalue()
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in written.removesuffix("\n").split("\n")]
    assert lines == ["  trained a: 1 of 2 (50%)", "  trained b: 2 of 2 (100%)"]
    assert ("\r  train step: 1 of 10 (10%)" in written) == is_terminal
