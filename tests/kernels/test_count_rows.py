import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import count_rows
from tests.kernels.forced import forced


def test_counts_are_added_in_place_by_hand():
    counts = np.array([10, 0, 0], dtype=np.int64)
    count_rows(counts, np.array([2, 0, 2, 2], dtype=np.int64))
    assert counts.tolist() == [11, 0, 3]


@pytest.mark.parametrize("num_rows", [1, 7, 32 * 1024, 32 * 1024 + 1, 100_003])
@pytest.mark.parametrize("num_ids", [0, 1, 1023, 1025, 20_001])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_thread_count_matches_the_reference(num_rows, num_ids, num_threads):
    ids = torch.randint(num_rows, (num_ids,), generator=torch.Generator().manual_seed(num_ids))
    expected = torch.arange(num_rows)
    count_rows(expected, ids, kernel="reference")
    counts = torch.arange(num_rows)
    with forced(threads=num_threads):
        count_rows(counts, ids)
    assert torch.equal(counts, expected)


@given(ids=st.lists(st.integers(0, 4), max_size=30), num_threads=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_numpy_and_torch_and_both_id_widths_agree(ids, num_threads):
    expected = [ids.count(row) for row in range(5)]
    for dtype in (np.int64, np.int32):
        counts = np.zeros(5, dtype=np.int64)
        tensor = torch.zeros(5, dtype=torch.int64)
        with forced(threads=num_threads):
            count_rows(counts, np.array(ids, dtype=dtype))
            count_rows(tensor, torch.from_numpy(np.array(ids, dtype=dtype)))
        assert counts.tolist() == expected
        assert tensor.tolist() == expected


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_a_bad_id_is_named_and_changes_nothing(kernel, bad):
    ids = np.zeros(5000, dtype=np.int64)
    ids[[4321, 4999]] = bad
    counts = np.zeros(5, dtype=np.int64)
    for num_threads in (1, 2):
        expected = rf"ids\[4321\] is {bad}, expected a row in \[0, 5\)"
        with forced(threads=num_threads), pytest.raises(ValueError, match=expected):
            count_rows(counts, ids, kernel=kernel)
    assert not counts.any()


def test_an_id_in_an_empty_table_is_refused():
    with pytest.raises(ValueError, match=r"ids\[0\] is 0"):
        count_rows(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_wrong_arrays_are_refused_by_name():
    counts, ids = np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64)
    with pytest.raises(ValueError, match="counts_R: dtype is int32"):
        count_rows(counts.astype(np.int32), ids)
    with pytest.raises(ValueError, match="ids: dtype is float64"):
        count_rows(counts, ids.astype(np.float64))
    with pytest.raises(ValueError, match="ids: must be contiguous"):
        count_rows(counts, ids[::2])
    with pytest.raises(ValueError, match="counts_R: must be contiguous"):
        count_rows(torch.zeros(8, dtype=torch.int64)[::2], ids)
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        count_rows(counts, ids, kernel="gpu")


def test_read_only_counts_are_refused():
    counts = np.zeros(4, dtype=np.int64)
    counts.flags.writeable = False
    with pytest.raises(ValueError, match="counts_R: is read-only"):
        count_rows(counts, np.zeros(1, dtype=np.int64))


def test_counting_numpy_arrays_does_not_load_torch():
    code = (
        "import sys, numpy as np\nfrom kernels import count_rows\n"
        "count_rows(np.zeros(3, np.int64), np.array([1]))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
