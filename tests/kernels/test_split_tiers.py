import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import distinct_keys, split_tiers
from tests.kernels.forced import forced

COMMON, NODE, HOT = 0, 1, 2


def make_map(num_rows: int, moved: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bits, ranks, entries); the moved rows are hot and node rows in turns, their slots falling."""
    bits = [0] * -(-num_rows // 64)
    for row in moved:
        bits[row // 64] |= 1 << row % 64
    signed = [word - (1 << 64) if word >> 63 else word for word in bits]
    ranks = [sum(row < 64 * word for row in moved) for word in range(len(bits))]
    entries = [(len(moved) - place) << 3 | (HOT if place % 2 else NODE) for place in range(len(moved))]
    return (
        torch.tensor(signed, dtype=torch.int64),
        torch.tensor(ranks, dtype=torch.int32),
        torch.tensor(entries, dtype=torch.int64),
    )


def expected(ids: list[int], moved: list[int]) -> tuple[list[int], list[int]]:
    tiers, slots = [], []
    for row in ids:
        if row in moved:
            place = moved.index(row)
            tiers.append(HOT if place % 2 else NODE)
            slots.append(len(moved) - place)
        else:
            tiers.append(COMMON)
            slots.append(row - sum(other < row for other in moved))
    return tiers, slots


@given(data=st.data(), num_rows=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_backend_finds_tier_and_slot_of_every_row(data, num_rows):
    moved = sorted(data.draw(st.sets(st.integers(0, num_rows - 1), max_size=num_rows)))
    ids = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=50))
    bits, ranks, entries = make_map(num_rows, moved)
    for kernel in ("cpu", "reference"):
        for dtype in (torch.int64, torch.int32):
            rows = torch.tensor(ids, dtype=dtype)
            tiers, slots = split_tiers(rows, bits, ranks, entries, num_rows=num_rows, common_tier=COMMON, kernel=kernel)
            assert (tiers.tolist(), slots.tolist()) == expected(ids, moved)


@pytest.mark.parametrize("num_ids", [0, 1, 1023, 1025, 100_001])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_thread_count_matches_the_reference(num_ids, num_threads):
    generator = torch.Generator().manual_seed(num_ids)
    moved = torch.randperm(5000, generator=generator)[:300].sort().values.tolist()
    bits, ranks, entries = make_map(5000, moved)
    ids = torch.randint(5000, (num_ids,), generator=generator)
    with forced(threads=num_threads):
        found = split_tiers(ids, bits, ranks, entries, num_rows=5000, common_tier=COMMON)
    wanted = split_tiers(ids, bits, ranks, entries, num_rows=5000, common_tier=COMMON, kernel="reference")
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_a_bad_id_is_named(kernel, bad):
    bits, ranks, entries = make_map(100, [3])
    ids = torch.zeros(5000, dtype=torch.int64)
    ids[[4321, 4999]] = bad
    with pytest.raises(ValueError, match=rf"ids\[4321\] is {bad}, expected a row in \[0, 100\)"):
        split_tiers(ids, bits, ranks, entries, num_rows=100, common_tier=COMMON, kernel=kernel)


def test_a_map_of_another_size_is_refused():
    bits, ranks, entries = make_map(100, [3])
    with pytest.raises(ValueError, match="2 and 2 words, expected 4"):
        split_tiers(torch.zeros(1, dtype=torch.int64), bits, ranks, entries, num_rows=200, common_tier=COMMON)


def test_a_table_without_moved_rows_keeps_its_rows():
    bits, ranks, entries = make_map(70, [])
    tiers, slots = split_tiers(torch.arange(70), bits, ranks, entries, num_rows=70, common_tier=3)
    assert slots.tolist() == list(range(70))
    assert set(tiers.tolist()) == {3}


@given(keys=st.lists(st.integers(0, 2**40 - 1), max_size=60), bound=st.sampled_from([2**40, 2**62]))
@settings(max_examples=60, deadline=None)
def test_distinct_keys_are_those_of_torch_unique(keys, bound):
    keys = torch.tensor(keys + keys[::2], dtype=torch.int64)
    found = distinct_keys(keys, bound=bound)
    wanted = distinct_keys(keys, bound=bound, kernel="reference")
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_key_beyond_the_bound_is_named():
    with pytest.raises(ValueError, match=r"keys\[1\] is 9, expected a row in \[0, 9\)"):
        distinct_keys(torch.tensor([3, 9]), bound=9)
