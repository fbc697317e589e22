from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernels.decode_pages import DecodedRows, GroupDecoder
from kernels.join_lists import PackedLists, join_lists, scan_lists
from tests.kernels.test_decode_pages import make_lists, write
from tests.kernels.test_join_lists import assert_same

BOUNDS = {"ids": 2**31, "full": 300, "empty": 1}
LISTS = [f"{name}.list.element" for name in BOUNDS]
FORMS: dict[str, dict[str, Any]] = {
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "differences": {"use_dictionary": False, "column_encoding": dict.fromkeys(LISTS, "DELTA_BINARY_PACKED")},
    "split bytes": {"use_dictionary": False, "column_encoding": dict.fromkeys(LISTS, "BYTE_STREAM_SPLIT")},
    "many pages": {"data_page_size": 200, "write_batch_size": 50},
    "dictionary given up": {"dictionary_pagesize_limit": 300, "write_batch_size": 64},
}


def make_rows(num_rows: int = 1000) -> pa.Table:
    rng = np.random.default_rng(3)
    return pa.table(
        {
            "label": pa.array(rng.integers(0, 2, num_rows).astype(np.float32)),
            "first": pa.array(rng.normal(size=num_rows).astype(np.float32)),
            "ids": make_lists(rng, pa.int64(), num_rows=num_rows, most=2**31),
            "second": pa.array(rng.normal(size=num_rows).astype(np.float32)),
            "full": make_lists(rng, pa.int64(), num_rows=num_rows, most=300, shortest=1),
            "empty": pa.array([[]] * num_rows, pa.list_(pa.int64())),
            "session_id": pa.array(rng.integers(-(2**60), 2**60, num_rows)),
        }
    )


def decode(table: pa.Table, bounds: dict[str, int] | None = None, **options: Any) -> pa.Table | DecodedRows:
    stored = write(table, row_group_size=10_000, **options)
    metadata = pq.read_metadata(io.BytesIO(stored))
    return GroupDecoder(metadata, range(metadata.num_columns), bounds=bounds or BOUNDS).decode(stored, 0, 0)


@pytest.mark.parametrize("form", FORMS)
def test_rows_hold_what_the_table_holds(form):
    table = make_rows()
    rows = decode(table, **FORMS[form])
    assert isinstance(rows, DecodedRows)
    for name in ("label", "first", "session_id"):
        assert np.array_equal(rows.numbers(name), table.column(name).to_numpy())
    stacked = np.empty((len(table), 2), np.float32)
    assert rows.stack(["second", "first"], stacked) is None
    assert np.array_equal(stacked, np.stack([table.column(name).to_numpy() for name in ("second", "first")], axis=1))
    lists = rows.lists_of(list(BOUNDS))
    for name, values, offsets in zip(BOUNDS, lists.values, lists.offsets, strict=True):
        expected = table.column(name).combine_chunks()
        assert np.array_equal(values, expected.values.to_numpy())
        assert np.array_equal(offsets, expected.offsets.to_numpy())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [-1, 300, 2**32 + 1, -(2**63)])
def test_an_id_outside_its_table_makes_a_table(form, wrong):
    table = make_rows()
    lists = table.column("full").to_pylist()
    lists[500][0] = wrong
    table = table.set_column(4, table.schema.field("full"), pa.array(lists, pa.list_(pa.int64())))
    found = decode(table, **FORMS[form])
    assert isinstance(found, pa.Table)
    assert found.equals(table)


def test_other_columns_and_wide_tables_make_a_table():
    table = make_rows()
    assert isinstance(decode(table, bounds=BOUNDS | {"ids": 2**31 + 1}), pa.Table)
    assert isinstance(decode(table.append_column("more", pa.array(np.zeros(len(table))))), pa.Table)
    missing = pa.array([None] + [1.0] * (len(table) - 1), pa.float32())
    assert isinstance(decode(table.append_column("more", missing)), pa.Table)


def test_missing_numbers_are_zero_and_infinite_ones_are_found():
    table = make_rows()
    for wrong, expected in ((np.nan, None), (np.inf, "second"), (-np.inf, "second")):
        numbers = table.column("second").to_numpy().copy()
        numbers[[0, 999]] = wrong
        rows = decode(table.set_column(3, "second", pa.array(numbers)))
        stacked = np.empty((len(table), 2), np.float32)
        assert rows.stack(["first", "second"], stacked) == expected
        if expected is None:
            assert np.array_equal(stacked[:, 1], np.nan_to_num(numbers))


@pytest.mark.parametrize("cuts", [[(3, 40)], [(0, 1000), (999, 1000), (10, 10), (0, 33)]])
def test_packed_lists_join_as_in_the_reference(cuts):
    lists = decode(make_rows()).lists_of(list(BOUNDS))
    pieces = [(lists, start, stop) for start, stop in cuts]
    ends, wrong = scan_lists(lists, list(BOUNDS.values()))
    assert wrong is None
    assert ends.tolist() == scan_lists(lists, kernel="reference")[0].tolist()
    assert scan_lists(lists, [2**31, 100, 1])[1] == 1
    num_values = sum(int(ends[stop] - ends[start]) for start, stop in cuts)
    found = join_lists(pieces, num_values=num_values)
    assert_same(found, join_lists(pieces, num_values=0, kernel="reference"))


def test_lists_outside_their_piece_are_refused():
    piece = pa.py_buffer(np.zeros(8, np.int32))
    for values_at, offsets_at, count in ((0, 24, 2), (0, 20, 9), (-4, 20, 1), (2, 20, 1), (0, 36, 1), (0, 20, -1)):
        places = {"values_at": np.array([values_at]), "offsets_at": np.array([offsets_at]), "counts": np.array([count])}
        with pytest.raises(ValueError, match="feature 0: its lists lie outside the piece"):
            scan_lists(PackedLists(piece=piece, num_rows=2, **places))
