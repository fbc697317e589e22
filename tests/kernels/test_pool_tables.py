import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import pool_tables
from kernels.pool_tables import FORMS, PooledTables, TableFeature
from recmill.serving.tables import pack_rows
from tests.kernels.forced import forced


def table_of(form, *, num_rows=20, dim=5, seed=0, is_ordered=False, **options):
    generator = torch.Generator().manual_seed(seed)
    rows = pack_rows(torch.randn(num_rows, dim, generator=generator), form)
    order = torch.randperm(num_rows, generator=generator).int() if is_ordered else None
    return TableFeature(rows=rows, form=form, dim=dim, order=order, **options)


def lists_of(lengths, num_rows, seed=0):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.random.default_rng(seed).integers(0, num_rows, offsets[-1]), offsets


def test_lists_are_summed_averaged_or_kept():
    rows = pack_rows(torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]), "float32")
    tables = PooledTables(
        [
            TableFeature(rows=rows, form="float32", dim=2, column=2),
            TableFeature(rows=rows, form="float32", dim=2, column=0, is_mean=True, max_length=2),
            TableFeature(rows=rows, form="float32", dim=2),
        ],
        width=4,
    )
    lists = (np.array([0, 1, 2, 2]), np.array([0, 0, 3, 4]))
    for kernel in ("cpu", "reference"):
        out, (kept,) = pool_tables(tables, [lists] * 3, num_lists=3, kernel=kernel)
        assert out.tolist() == [[0, 0, 0, 0], [3, 30, 7, 70], [4, 40, 4, 40]]
        assert kept.tolist() == [[1, 10], [2, 20], [4, 40], [4, 40]]


@given(
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=4),
    num_lists=st.integers(0, 9),
    dim=st.sampled_from([1, 3, 8, 9, 16, 33]),
    is_ordered=st.booleans(),
    is_portable=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_every_form_agrees_with_the_reference(forms, num_lists, dim, is_ordered, is_portable, num_threads, seed):
    rng = np.random.default_rng(seed)
    features, lists = [], []
    for number, form in enumerate(forms):
        column = -1 if rng.random() < 0.3 else number * dim
        how = {"column": column, "is_mean": bool(rng.integers(2)), "max_length": int(rng.choice([0, 1, 4]))}
        features.append(table_of(form, dim=dim, seed=seed + number, is_ordered=is_ordered, **how))
        lists.append(lists_of(rng.integers(0, 9, num_lists), 20, seed + number))
    tables = PooledTables(features, width=dim * len(forms))
    expected, expected_rows = pool_tables(tables, lists, num_lists=num_lists, kernel="reference")
    with forced(threads=num_threads, is_portable=is_portable):
        found, rows = pool_tables(tables, lists, num_lists=num_lists)
    for feature in features:
        if feature.column >= 0:
            columns = slice(feature.column, feature.column + dim)
            torch.testing.assert_close(found[:, columns], expected[:, columns], atol=1e-5, rtol=1e-5)
    for own, exact in zip(rows, expected_rows, strict=True):
        torch.testing.assert_close(own, exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_form(form):
    """Also where scale and offset, halves in int4, are tiny, huge or not numbers."""
    values = torch.tensor([[0.0] * 4, [1e-6, 0, 0, 0], [-3e4, 3e4, 0, 1], [-1e-3, 1, 2, 3]])
    tables = PooledTables([TableFeature(rows=pack_rows(values, form), form=form, dim=4)], width=0)
    lists = [(np.arange(4), np.arange(5))]
    _, (found,) = pool_tables(tables, lists, num_lists=4)
    _, (expected,) = pool_tables(tables, lists, num_lists=4, kernel="reference")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_any_number_of_threads_gives_the_same_bits():
    features = [table_of(form, dim=17, num_rows=300, column=17 * n) for n, form in enumerate(FORMS)]
    tables = PooledTables(features, width=17 * 4)
    lists = [lists_of(np.arange(50) % 7, 300, seed) for seed in range(4)]
    with forced(threads=1):
        one, _ = pool_tables(tables, lists, num_lists=50)
    with forced(threads=3):
        three, _ = pool_tables(tables, lists, num_lists=50)
    assert torch.equal(one, three)


def test_hostile_lists_are_refused():
    tables = PooledTables([table_of("float32", column=0)], width=5)
    good = (np.array([1, 2, 3]), np.array([0, 1, 3]))
    wrong = [
        (np.array([1, 2, 20]), good[1], r"feature 0: expected ids in \[0, 20\)"),
        (np.array([1, -1, 2]), good[1], r"feature 0: expected ids in \[0, 20\)"),
        (good[0], np.array([0, 1, 4]), "offsets of feature 0"),
        (good[0], np.array([0, 2, 1]), "offsets of feature 0"),
        (good[0], np.array([1, 2, 3]), "rise from 0 to 3"),
        (good[0], np.array([0, 1, 2]), "rise from 0 to 3"),
        (good[0], np.array([0, 3]), "offsets of feature 0: has 2 elements, expected 3"),
        (good[0].astype(np.int32), good[1], "dtype is int32"),
        (good[0][:, None], good[1], "one dimension"),
    ]
    for values, offsets, message in wrong:
        with pytest.raises(ValueError, match=message):
            pool_tables(tables, [(values, offsets)], num_lists=2)
    with pytest.raises(ValueError, match="received 2 features, expected 1"):
        pool_tables(tables, [good, good], num_lists=2)


def test_tables_that_are_not_what_they_claim_are_refused():
    rows = torch.zeros(4, 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="form 0 and width 4 do not have 12 bytes"):
        PooledTables([TableFeature(rows=rows, form="float32", dim=4)], width=4)
    with pytest.raises(ValueError, match="does not fit into 4 columns"):
        PooledTables([TableFeature(rows=rows, form="float32", dim=3, column=2)], width=4)
    with pytest.raises(ValueError, match="order of feature 0: has 3 elements, expected 4"):
        PooledTables([TableFeature(rows=rows, form="float32", dim=3, order=torch.zeros(3, dtype=torch.int32))], width=0)
    outside = PooledTables(
        [TableFeature(rows=rows, form="float32", dim=3, column=0, order=torch.tensor([0, 4, -1, 1]).int())], width=3
    )
    assert pool_tables(outside, [(np.array([0, 3]), np.array([0, 2]))], num_lists=1)[0].tolist() == [[0, 0, 0]]
    for row in (1, 2):
        with pytest.raises(ValueError, match="order of a table names a row"):
            pool_tables(outside, [(np.array([row]), np.array([0, 1]))], num_lists=1)
