import numpy as np
import pytest

from kernels.stack_columns import stack_columns


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 3), (1, 1), (255, 2), (257, 13), (1000, 0)])
def test_columns_stack_as_in_the_reference(num_rows, num_columns):
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=num_rows).astype(np.float32) for _ in range(num_columns)]
    stacked, wrong = stack_columns(columns, num_rows)
    assert np.array_equal(stacked, stack_columns(columns, num_rows, kernel="reference")[0])
    assert stacked.shape == (num_rows, num_columns)
    assert wrong is None


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_the_first_column_that_is_not_finite_is_found(number):
    columns = [np.full(600, value, np.float32) for value in (np.finfo(np.float32).max, 0, -3, 1e-45)]
    columns[2][599], columns[3][0] = number, number
    for kernel in ("cpu", "reference"):
        stacked, wrong = stack_columns(columns, 600, kernel=kernel)
        assert wrong == 2
        assert np.array_equal(stacked, np.stack(columns, axis=1), equal_nan=True)


def test_a_column_with_a_step_stacks_and_another_type_is_refused():
    wide = np.arange(20, dtype=np.float32)
    assert stack_columns([wide[::2], wide[1::2]], 10)[0].reshape(-1).tolist() == wide.tolist()
    with pytest.raises(ValueError, match="dtype is float64"):
        stack_columns([np.zeros(3)], 3)
    with pytest.raises(ValueError, match="has 3 elements, expected 4"):
        stack_columns([np.zeros(3, np.float32)], 4)
