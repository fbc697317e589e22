"""Live progress of a run: rates and times left, lines without a terminal, one line in place on one."""

from __future__ import annotations

import time

import pytest

from pipelines.follower import BAR_WIDTH, Follower, Work, draw_bar, format_clock

STEPS = ("generate_data", "train_model")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_follow_from_what_was_counted() -> None:
    work = Work(what="train step", began=10.0, counted_at=10.5, first=20, done=80, total=126)
    assert work.describe(10.5, has_bar=False) == "train step 80 of 126  63%"  # too early for a rate
    work.counted_at = 14.0
    assert work.describe(14.0, has_bar=False) == "train step 80 of 126  63%  15/s  0:03 left"
    assert work.describe(16.0, has_bar=False) == "train step 80 of 126  63%  15/s  0:01 left"
    done = Work(what="train step", began=10.0, counted_at=14.0, first=20, done=126, total=126)
    assert done.describe(99.0, has_bar=False) == "train step 126 of 126  100%  26.5/s"


def test_bars_fill_and_never_overflow() -> None:
    assert draw_bar(0.0) == " " * BAR_WIDTH
    assert draw_bar(0.5) == "█" * (BAR_WIDTH // 2) + " " * (BAR_WIDTH // 2)
    assert draw_bar(1.0) == draw_bar(1.7) == "█" * BAR_WIDTH
    assert all(len(draw_bar(share / 100)) == BAR_WIDTH for share in range(101))


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_clocks_read_as_people_write_them(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def test_a_log_gets_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Follower(steps=STEPS, clock=clock, is_terminal=False) as follow:
        follow("train_model", "started")
        for step in range(1, 15):
            clock.now += 1.0
            follow("train_model", f"train step: {step * 10} of 200 ({step * 5}%)")
        follow("train_model", "done in 20.0 s: AUC 0.7639")
    assert capsys.readouterr().err.splitlines() == [
        "[1/2] train_model   ...",
        "[1/2] train_model   train step 50 of 200  25%  10/s  0:15 left  0:05",
        "[1/2] train_model   train step 100 of 200  50%  10/s  0:10 left  0:10",
        "[1/2] train_model   done in 20.0 s: AUC 0.7639",
    ]


def test_on_a_terminal_the_line_is_rewritten_and_the_clock_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with Follower(steps=STEPS, is_terminal=True) as follow:
        follow("generate_data", "started")
        follow("generate_data", "write rows: 5 of 10 (50%)")
        time.sleep(0.6)  # two ticks
        follow("generate_data", "done in 1.0 s")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "\r\x1b[K[1/2] generate_data write rows 5 of 10  " + draw_bar(0.5) in shown
    assert "\r\x1b[K[1/2] generate_data done in 1.0 s\n" in shown


def test_machines_are_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Follower(steps=STEPS, is_silent=True, is_terminal=True) as follow:
        follow("generate_data", "started")
    assert capsys.readouterr().err == ""
