from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.data.ingest.order import (
    Order,
    lane_bounds,
    lane_quotas,
    num_lanes_for,
    permute_groups,
    permute_runs,
    spread_sessions,
)

group_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple)


def make_order(group_rows, *, batch_size, num_lanes=8, rank=0, world_size=1, seed=5, shuffle=True, **more) -> Order:
    return Order(
        group_rows=group_rows,
        batch_size=batch_size,
        num_lanes=num_lanes,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
        **more,
    )


def rows_of_batches(order: Order, epoch: int, *, first_batch: int = 0, share_items: bool = True):
    """The (group, row) pairs of every batch of a rank."""
    plan = order.plan(epoch, first_batch=first_batch, share_items=share_items)
    return [
        [(plan.items[item].group, row) for item, start, stop in plan.slices(batch) for row in range(start, stop)]
        for batch in range(first_batch, plan.num_batches)
    ]


def global_batches(group_rows, *, batch_size, num_lanes, world_size, **options):
    ranks = [
        rows_of_batches(
            make_order(group_rows, batch_size=batch_size, num_lanes=num_lanes, rank=rank, world_size=world_size),
            epoch=1,
            **options,
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1, "every rank has the same number of batches"
    return [[row for share in shares for row in share] for shares in zip(*ranks, strict=True)]


@settings(max_examples=150, deadline=None)
@given(group_rows=group_sizes, batch_size=st.integers(1, 100), world_size=st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
def test_an_epoch_gives_every_row_to_one_batch_of_one_rank(group_rows, batch_size, world_size):
    batches = global_batches(
        group_rows, batch_size=batch_size, num_lanes=num_lanes_for(world_size), world_size=world_size
    )
    expected = {(group, row): 1 for group, num_rows in enumerate(group_rows) for row in range(num_rows)}
    assert Counter(row for batch in batches for row in batch) == expected


@settings(max_examples=100, deadline=None)
@given(group_rows=group_sizes, batch_size=st.integers(1, 100), share_items=st.booleans())
def test_a_global_batch_is_the_same_at_every_number_of_ranks(group_rows, batch_size, share_items):
    alone = global_batches(group_rows, batch_size=batch_size, num_lanes=8, world_size=1)
    for world_size in (2, 4, 8):
        together = global_batches(
            group_rows, batch_size=batch_size, num_lanes=8, world_size=world_size, share_items=share_items
        )
        assert together == alone


@settings(max_examples=100, deadline=None)
@given(group_rows=group_sizes, batch_size=st.integers(1, 100), num_lanes=st.sampled_from([8, 9, 10, 16]))
def test_only_the_last_batch_is_short(group_rows, batch_size, num_lanes):
    batches = global_batches(group_rows, batch_size=batch_size, num_lanes=num_lanes, world_size=1)
    num_rows = sum(group_rows)
    assert len(batches) == -(-num_rows // batch_size)
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert len(batches[-1]) == num_rows - batch_size * (len(batches) - 1)


@settings(max_examples=100, deadline=None)
@given(
    group_rows=group_sizes,
    batch_size=st.integers(1, 60),
    worlds=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    data=st.data(),
)
def test_an_epoch_resumes_at_any_batch_with_another_number_of_ranks(group_rows, batch_size, worlds, data):
    whole = global_batches(group_rows, batch_size=batch_size, num_lanes=8, world_size=worlds[0])
    first_batch = data.draw(st.integers(0, len(whole)))
    rest = global_batches(group_rows, batch_size=batch_size, num_lanes=8, world_size=worlds[1], first_batch=first_batch)
    assert whole[:first_batch] + rest == whole


@settings(max_examples=100, deadline=None)
@given(group_rows=group_sizes, batch_size=st.integers(1, 60), share_items=st.booleans(), data=st.data())
def test_a_batch_needs_only_the_items_before_its_mark(group_rows, batch_size, share_items, data):
    order = make_order(group_rows, batch_size=batch_size)
    first_batch = data.draw(st.integers(0, order.batches_per_epoch - 1))
    plan = order.plan(0, first_batch=first_batch, share_items=share_items)
    used = set()
    for batch in range(first_batch, plan.num_batches):
        for position, start, stop in plan.slices(batch):
            item = plan.items[position]
            assert position < plan.num_needed(batch)
            assert item.first_batch <= batch <= item.last_batch
            assert 0 <= start < stop <= group_rows[item.group]
            used.add(position)
    assert used == set(range(len(plan.items))), "nothing is read that no batch uses"


def test_a_row_group_in_two_lanes_is_read_once_when_shared_and_twice_when_not():
    order = make_order((100,), batch_size=8, shuffle=False)
    assert len(order.plan(0, share_items=True).items) == 1
    assert len(order.plan(0, share_items=False).items) == 8


def test_a_rank_reads_its_own_row_groups_only():
    order = make_order((10,) * 16, batch_size=16, rank=1, world_size=4, shuffle=False)
    assert sorted(item.group for item in order.plan(0).items) == [4, 5, 6, 7]


def test_lanes_are_cut_as_documented():
    assert lane_bounds(100, 16, 8) == [lane * 100 // 8 for lane in range(9)]
    assert lane_quotas(16, 8) == [2] * 8
    assert lane_quotas(20, 8) == [2, 3, 2, 3, 2, 3, 2, 3]
    assert lane_quotas(3, 8) == [0, 0, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(("world_size", "num_lanes"), [(1, 8), (2, 8), (3, 9), (5, 10), (8, 8), (12, 12)])
def test_lanes_are_the_smallest_multiple_of_the_ranks_from_eight_on(world_size, num_lanes):
    assert num_lanes_for(world_size) == num_lanes


def test_the_permutation_depends_on_seed_and_epoch_alone():
    first = permute_groups(50, seed=1, epoch=0)
    assert sorted(first) == list(range(50))
    assert np.array_equal(first, permute_groups(50, seed=1, epoch=0))
    assert not np.array_equal(first, permute_groups(50, seed=1, epoch=1))
    assert not np.array_equal(first, permute_groups(50, seed=2, epoch=0))
    assert np.array_equal(permute_groups(50, seed=1, epoch=1, shuffle=False), np.arange(50))


def test_runs_move_within_their_row_group_and_those_in_two_stay():
    runs = permute_runs([0, 103, 200], 10, seed=(1, 0, 0))
    assert sorted(runs[:10]) == list(range(10))
    assert runs[10] == 10, "rows 100 to 109 lie in both"
    assert sorted(runs[11:]) == list(range(11, 20))
    assert not np.array_equal(runs, np.arange(20))


def test_the_parts_of_a_lane_take_turns():
    runs = permute_runs([0, *range(10, 130, 10)], 10, num_parts=4, seed=(1, 0, 0))  # a run a row group: none can move
    assert runs.tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_runs_depend_on_their_seed_alone_and_stay_without_one():
    first = permute_runs([0, 500], 10, num_parts=4, seed=(1, 0, 3))
    assert np.array_equal(first, permute_runs([0, 500], 10, num_parts=4, seed=(1, 0, 3)))
    assert not np.array_equal(first, permute_runs([0, 500], 10, num_parts=4, seed=(1, 0, 4)))
    assert np.array_equal(permute_runs([0, 500], 10, num_parts=4), np.arange(50))


def test_rows_that_fill_no_run_come_last():
    assert permute_runs([0, 45], 10, num_parts=4, seed=(1, 0, 0))[-1] == 4


def test_no_more_row_groups_are_held_than_the_parts_have_in_hand():
    for num_parts in (1, 2, 4):
        order = make_order((20,) * 640, batch_size=80, num_parts=num_parts)
        items = order.plan(0).items
        most = max(sum(item.first_batch <= batch <= item.last_batch for item in items) for batch in range(160))
        assert 8 * num_parts <= most <= 2 * 8 * num_parts


def test_the_batches_of_an_epoch_wander_through_a_row_group_unless_it_is_not_shuffled():
    mixed, stored = (
        [rows[0][1] for rows in rows_of_batches(make_order((4_000,), batch_size=80, shuffle=shuffle), epoch=0)]
        for shuffle in (True, False)
    )
    assert stored == sorted(stored)
    assert sorted(mixed) == stored
    assert mixed != stored
    others = [rows[0][1] for rows in rows_of_batches(make_order((4_000,), batch_size=80), epoch=1)]
    assert others != mixed, "every epoch has its own order"


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), limit=st.integers(1, 12), seed=st.integers(0, 5))
def test_sessions_are_spread_in_pieces_of_neighbouring_rows(sizes, limit, seed):
    order = spread_sessions(np.array(sizes), limit=limit, seed=(seed,)).tolist()
    assert sorted(order) == list(range(sum(sizes)))
    num_cuts = sum(after != before + 1 for before, after in pairwise(order))
    assert num_cuts < sum(-(-size // limit) for size in sizes)  # fewer cuts than pieces: rows of a piece stay together


def test_two_pieces_of_a_session_rarely_meet():
    order = spread_sessions(np.full(400, 16), limit=8, seed=(0,))
    runs = (order // 16).reshape(-1, 160)  # 20 pieces each
    assert np.mean([len(np.unique(run)) for run in runs]) > 19
