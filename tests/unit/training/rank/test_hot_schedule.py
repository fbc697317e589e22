"""Every batch comes once per epoch, in turns whose length follows the held-out loss."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.training.rank.hot_schedule import BatchBlock, HotSchedule


def blocks_of(schedule):
    return list(iter(schedule.next_block, None))


def test_half_of_the_hot_batches_then_half_of_the_cold_ones():
    schedule = HotSchedule(num_hot=10, num_cold=4)
    assert blocks_of(schedule) == [
        BatchBlock(is_hot=True, start=0, count=5),
        BatchBlock(is_hot=False, start=0, count=2),
        BatchBlock(is_hot=True, start=5, count=5),
        BatchBlock(is_hot=False, start=2, count=2),
    ]
    assert schedule.num_swaps == 4
    assert schedule.next_block() is None


def test_both_kinds_end_together_however_fine_the_turns():
    rare = HotSchedule(num_hot=8, num_cold=2, rate=0.01)
    assert [(block.is_hot, block.count) for block in blocks_of(rare)] == [(True, 4), (False, 1)] * 2
    even = HotSchedule(num_hot=90, num_cold=30, rate=0.1)
    assert [(block.is_hot, block.count) for block in blocks_of(even)] == [(True, 9), (False, 3)] * 10
    uneven = HotSchedule(num_hot=5, num_cold=7, rate=0.5)
    assert [(block.is_hot, block.count) for block in blocks_of(uneven)] == [
        (True, 3),
        (False, 4),
        (True, 2),
        (False, 3),
    ]


@given(num_hot=st.integers(1, 200), num_cold=st.integers(1, 200), rate=st.floats(0.01, 1))
@example(num_hot=31, num_cold=9, rate=0.0625)
@example(num_hot=140, num_cold=100, rate=0.01)
def test_cold_batches_follow_the_hot_ones_within_half_a_batch(num_hot, num_cold, rate):
    schedule = HotSchedule(num_hot=num_hot, num_cold=num_cold, rate=rate)
    done = {True: 0, False: 0}
    for block in blocks_of(schedule):
        done[block.is_hot] += block.count
        if not block.is_hot:
            lag = done[True] / num_hot - done[False] / num_cold
            assert abs(lag) <= 0.5 / num_cold + 1e-9


def test_the_rate_halves_when_the_loss_rises_and_doubles_after_it_fell_three_times():
    schedule = HotSchedule(num_hot=100, num_cold=100)
    rates = [schedule.observe(loss) for loss in (0.6, 0.7, 0.6, 0.5, 0.4, 0.45, 0.44, 0.43, 0.42)]
    assert rates == [0.5, 0.25, 0.25, 0.25, 0.5, 0.25, 0.25, 0.25, 0.5]


def test_the_rate_stays_between_one_and_a_hundred_percent():
    rising = HotSchedule(num_hot=100, num_cold=100)
    for step in range(20):
        rising.observe(float(step))
    assert rising.rate == 0.01
    falling = HotSchedule(num_hot=100, num_cold=100)
    for step in range(20):
        falling.observe(-float(step))
    assert falling.rate == 1.0


def test_turns_end_after_cold_blocks():
    schedule = HotSchedule(num_hot=4, num_cold=4)
    seen = []
    while schedule.next_block() is not None:
        seen.append(schedule.is_turn_over)
    assert seen == [False, True, False, True]


@given(
    num_hot=st.integers(0, 60),
    num_cold=st.integers(0, 60),
    losses=st.lists(st.floats(0, 1), max_size=40),
    cut=st.integers(0, 20),
)
def test_every_batch_comes_once_and_a_saved_schedule_goes_on_the_same(num_hot, num_cold, losses, cut):
    schedule = HotSchedule(num_hot=num_hot, num_cold=num_cold)
    copy = HotSchedule(num_hot=num_hot, num_cold=num_cold)
    seen = {True: [], False: []}
    pending = iter(losses)
    number = 0
    while True:
        if number == cut:
            copy.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        block = schedule.next_block()
        if number >= cut:
            assert copy.next_block() == block
        if block is None:
            break
        assert block.count > 0
        seen[block.is_hot] += range(block.start, block.start + block.count)
        loss = next(pending, None)
        if loss is not None and schedule.is_turn_over:
            schedule.observe(loss)
            if number >= cut:
                copy.observe(loss)
        number += 1
    assert seen == {True: list(range(num_hot)), False: list(range(num_cold))}
    schedule.start_epoch()
    assert (schedule.next_block() is None) == (num_hot + num_cold == 0)


def test_a_schedule_of_other_data_is_refused():
    saved = HotSchedule(num_hot=5, num_cold=5).state_dict()
    with pytest.raises(InputError, match="the saved schedule has num_hot 5, this run has 6"):
        HotSchedule(num_hot=6, num_cold=5).load_state_dict(saved)
