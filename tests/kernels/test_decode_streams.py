import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import _cpu, decode_inverse, decode_symbols, decode_windows

KERNELS = pytest.mark.parametrize("kernel", ["cpu", "reference"])


def ints(*numbers):
    return np.array(numbers, np.int32)


def ids(*numbers):
    return np.array(numbers, np.int64)


def octets(*numbers):
    return np.array(numbers, np.uint8)


def pack(bits, first_bit=0):
    return np.packbits(np.array([True] * first_bit + list(bits), np.bool_), bitorder="little")


@KERNELS
@pytest.mark.parametrize("first_bit", [0, 3, 8])
def test_a_row_keeps_its_list_until_it_changes(kernel, first_bit):
    bits = pack([False, True, True], first_bit)
    inverse, num_distinct = decode_inverse(ints(4, 1), bits, ints(0, 1), num_bits=3, first_bit=first_bit, kernel=kernel)
    assert inverse.tolist() == [0, 0, 1, 0, 2]
    assert num_distinct.tolist() == [2, 1]


@given(
    sessions=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5),
    first_bit=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_any_inverse_comes_back(sessions, first_bit):
    expected, num_distinct, changed, again = [], [], [], []
    for lists in sessions:
        base, seen = sum(num_distinct), []
        for row, own in enumerate(lists):
            is_new = own not in seen
            if is_new:
                seen.append(own)
            if row:
                changed.append(own != lists[row - 1])
                if changed[-1]:
                    again.append(0 if is_new else 1 + seen.index(own))
            expected.append(base + seen.index(own))
        num_distinct.append(len(seen))
    told = again if any(again) else []
    for kernel in ("cpu", "reference"):
        found = decode_inverse(
            ints(*map(len, sessions)),
            pack(changed, first_bit),
            ints(*told),
            num_bits=len(changed),
            first_bit=first_bit,
            kernel=kernel,
        )
        assert [own.tolist() for own in found] == [expected, num_distinct]


@KERNELS
@pytest.mark.parametrize(
    ("num_rows", "bits", "again"),
    [
        (ints(3), [True], ints()),  # a bit too few
        (ints(2, 0), [], ints()),  # a session without rows
        (ints(3), [True, True], ints(0)),  # two rows changed, one is told
        (ints(3), [True, False], ints(1, 1)),  # one row changed, two are told
        (ints(3), [True, True], ints(3, 0)),  # the session has one list so far
        (ints(3), [True, True], ints(-1, 0)),
    ],
)
def test_an_inverse_that_does_not_fit_its_sessions_is_refused(kernel, num_rows, bits, again):
    with pytest.raises(ValueError, match=r"rows|change"):
        decode_inverse(num_rows, pack(bits), again, num_bits=len(bits), kernel=kernel)
    with pytest.raises(ValueError, match="bits, expected 99"):
        decode_inverse(num_rows, pack(bits), again, num_bits=99, kernel=kernel)


BEGINS = np.zeros(256, np.int64)
BEGINS[:2] = 40, 50  # ids of their own
BEGINS[2] = 2  # a block: from position 2 of the popular ids on
BEGINS[4] = 1 << 16  # ids from 65536 on, two bytes follow
NUM_REST = np.zeros(256, np.int32)
NUM_REST[2], NUM_REST[3:5] = 1, 2
POPULAR = ids(40, 50, 60, 70)
CODE = {"begins": BEGINS, "num_rest": NUM_REST, "first_escape": 3, "popular": POPULAR}


@KERNELS
def test_symbols_are_ids_blocks_or_high_bits(kernel):
    found = decode_symbols(octets(1, 2, 4, 0, 2, 3), octets(1, 5, 1, 0, 255, 0), **CODE, kernel=kernel)
    assert found.tolist() == [50, 70, 65536 + 5 + 256, 40, 60, 255]
    assert decode_symbols(octets(), octets(), **CODE, kernel=kernel).tolist() == []


def test_long_streams_of_symbols_decode_as_the_reference_says():
    generator = np.random.default_rng(0)
    symbols = generator.integers(0, 5, 1_000).astype(np.uint8)
    rest = generator.integers(0, 2, int(NUM_REST[symbols].sum())).astype(np.uint8)
    expected = decode_symbols(symbols, rest, **CODE, kernel="reference")
    np.testing.assert_array_equal(decode_symbols(symbols, rest, **CODE, kernel="cpu"), expected)
    first_block = int(np.argmax(symbols == 2))
    rest[int(NUM_REST[symbols[:first_block]].sum())] = 2  # there are 4 popular ids, this is the fifth
    with pytest.raises(ValueError, match=f"symbol {first_block}"):
        decode_symbols(symbols, rest, **CODE, kernel="cpu")


@KERNELS
@pytest.mark.parametrize(
    ("symbols", "rest"),
    [(octets(2), octets()), (octets(2), octets(2)), (octets(4), octets(1)), (octets(0), octets(1))],
)
def test_symbols_without_their_bytes_are_refused(kernel, symbols, rest):
    with pytest.raises(ValueError, match="symbol"):
        decode_symbols(symbols, rest, **CODE, kernel=kernel)


@KERNELS
def test_sequences_lie_one_after_another_or_are_shared(kernel):
    values = ids(*range(10, 20))
    # Session 0 has the windows [0, 3) and [1, 4), session 1 has [0, 2).
    found = decode_windows(values, ints(3, 1, 2), ints(3), ids(2, 1), kernel=kernel)
    assert [own.tolist() for own in found] == [values.tolist(), [0, 1, 4], [3, 3, 2]]
    # Session 0 ends at 3 and 4 of the sequence at 5, session 1 at 2 of that at 0, session 2 at 5 of that at 5.
    found = decode_windows(
        values, ints(3, 1, 2, 5), ints(2, 0, 1, 2), ids(2, 1, 1), begins_S=ids(5, 0, 5), kernel=kernel
    )
    assert [own.tolist() for own in found] == [[11, 16, 17, 18, 19], [1, 2, 0, 3], [2, 2, 1, 2]]


@given(
    sessions=st.lists(
        st.tuples(st.sampled_from([0, 7, 12]), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1)),
        min_size=1,
        max_size=6,
    ),
    is_shared=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_both_backends_give_the_windows_of_each_session(sessions, is_shared):
    values, windows, steps, lengths, begin = ids(*range(100, 400)), [], [], [], 0
    for own, pairs in sessions:
        begin = own if is_shared else begin
        ends = [max(pair) for pair in pairs]
        sizes = [abs(last - first) for first, last in pairs]
        steps += np.diff(ends, prepend=0).tolist()
        lengths += np.diff(sizes, prepend=0).tolist()
        windows += [values[begin + end - size : begin + end].tolist() for end, size in zip(ends, sizes, strict=True)]
        begin += max(ends)
    if len(windows) == 1:
        lengths = [len(windows[0])]
    begins = ids(*(own for own, _ in sessions)) if is_shared else None
    num_distinct = ids(*(len(pairs) for _, pairs in sessions))
    results = [
        decode_windows(values, ints(*steps), ints(*lengths), num_distinct, begins_S=begins, kernel=kernel)
        for kernel in ("cpu", "reference")
    ]
    for found, starts, sizes in results:
        taken = [found[start : start + size].tolist() for start, size in zip(starts, sizes, strict=True)]
        assert taken == windows
    assert [own.tolist() for own in results[0]] == [own.tolist() for own in results[1]]


@KERNELS
@pytest.mark.parametrize(
    ("steps", "lengths", "num_distinct", "begins"),
    [
        (ints(3, 1), ints(3), ids(1), None),  # two windows, one distinct row
        (ints(3, 1), ints(1, 1, 1), ids(2), None),
        (ints(3, -9), ints(3), ids(2), None),  # ends before its sequence begins
        (ints(3), ints(-1), ids(1), None),
        (ints(9, 2), ints(3), ids(2), None),  # ends after the values
        (ints(3), ints(3), ids(1), ids(8)),
    ],
)
def test_windows_outside_of_their_sequence_are_refused(kernel, steps, lengths, num_distinct, begins):
    with pytest.raises(ValueError, match="window"):
        decode_windows(ids(*range(10)), steps, lengths, num_distinct, begins_S=begins, kernel=kernel)


def test_arrays_of_another_type_are_refused():
    with pytest.raises(ValueError, match="num_rows_S: dtype is int64, expected int32"):
        decode_inverse(ids(1), octets(), ints(), num_bits=0)
    with pytest.raises(ValueError, match="begins_S: has 2 elements, expected 1"):
        decode_windows(ids(), ints(0), ints(0), ids(1), begins_S=ids(0, 0))
    with pytest.raises(ValueError, match="begins: has 0 elements, expected 256"):
        decode_symbols(octets(), octets(), begins=ids(), num_rest=ints(), first_escape=0, popular=ids())
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        decode_windows(ids(), ints(0), ints(0), ids(1), kernel="gpu")


def test_numbers_of_windows_whose_sum_overflows_are_refused():
    """Found while tests/fuzz was written: the sum of hostile counts wrapped around to the number of windows."""
    counts = np.array([2**62, 2**62, 2**62, 2**62 - 1, 2], dtype=np.int64)  # their sum is 1, modulo 2**64
    one, starts = np.ones(1, np.int32), np.zeros(1, np.int64)
    for begins in (None, np.zeros(5, np.int64)):
        with pytest.raises(ValueError, match="windows, of 1 in all sessions"):
            _cpu.decode_windows(8, one, one, counts, begins, starts, one.copy(), np.zeros(10, np.int64))


def test_popular_positions_beyond_any_number_are_refused():
    begins, counts = np.zeros(256, np.int64), np.zeros(256, np.int32)
    begins[0], counts[0] = 2**63 - 1, 1
    symbol, following = np.zeros(1, np.uint8), np.full(1, 255, np.uint8)
    with pytest.raises(ValueError, match="names popular id"):
        _cpu.decode_symbols(symbol, following, begins, counts, 1, np.arange(4), np.zeros(1, np.int64))
