import numpy as np
import pyarrow as pa
import pytest
import torch

from kernels import _cpu


@pytest.mark.parametrize("wrong", [5, "ids", None, [1, 2], object()])
def test_what_is_no_array_is_refused(wrong):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _cpu.count_rows(np.zeros(3, np.int64), wrong)


def test_numpy_torch_and_arrow_are_read_in_place():
    counts = torch.zeros(3, dtype=torch.int64)
    for ids in (
        np.array([0, 2]),
        torch.tensor([2, 2], dtype=torch.int32),
        torch.nn.Parameter(torch.tensor([1]), False),
    ):
        _cpu.count_rows(counts, ids)
    assert counts.tolist() == [1, 1, 3]
    ids = np.frombuffer(pa.py_buffer(np.array([1]).tobytes()), np.int64)
    assert not ids.flags.writeable
    _cpu.count_rows(counts, ids)
    assert counts.tolist() == [1, 2, 3]


def test_a_read_only_output_is_refused():
    counts = np.zeros(3, np.int64)
    counts.flags.writeable = False
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _cpu.count_rows(counts, np.array([0]))


def test_dtype_size_layout_and_device_are_checked_by_name():
    out, inverse = torch.empty(2, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="inverse: dtype is float32, expected int64"):
        _cpu.expand_rows(torch.ones(3, 4), inverse.float(), out)
    with pytest.raises(ValueError, match="distinct: must be contiguous"):
        _cpu.expand_rows(torch.ones(4, 3).t(), inverse, out)
    with pytest.raises(ValueError, match="out: has another shape"):
        _cpu.expand_rows(torch.ones(3, 4), inverse, torch.empty(3, 4))
    with pytest.raises(ValueError, match="inverse: has 3 elements, expected 2"):
        _cpu.distinct_keys(inverse, 2, torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.int64))
    with pytest.raises((TypeError, ValueError)):
        _cpu.expand_rows(torch.ones(3, 4, device="meta"), inverse, out)
