from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.ikjt.batch import assemble_batch, decode_block, expand_block
from recmill.data.ikjt.distinct import DistinctBlock, DistinctGroup
from recmill.data.schema import Feature, Schema

SCHEMA = Schema(
    features=(
        Feature(name="a", kind="sparse", num_rows=100, dim=4),
        Feature(name="x", kind="dense"),
        Feature(name="b", kind="sequence", num_rows=100, dim=4),
    )
)
LISTS = pa.list_(pa.int64())


def batch_from_arrow(table, schema, where="table"):
    """All rows of `table` as one batch."""
    block = decode_block(table, schema, where=where)
    return assemble_batch([(block, 0, table.num_rows)], schema, num_global=table.num_rows)


def make_table(rows: list[tuple[list[int], float, list[int]]], **columns: pa.Array) -> pa.Table:
    """Rows of (a, x, b), labelled 0, 1, 2, ...; a column given by name replaces the one made here."""
    made = {
        "label": pa.array(np.arange(len(rows), dtype=np.float32)),
        "a": pa.array([row[0] for row in rows], type=LISTS),
        "x": pa.array([row[1] for row in rows], type=pa.float32()),
        "b": pa.array([row[2] for row in rows], type=LISTS),
    }
    return pa.table(made | columns)


def read_back(batch) -> list[tuple[list[int], float, list[int]]]:
    if not len(batch):  # TorchRec cannot split a KeyedJaggedTensor of stride 0
        return []
    features = batch.ids.to_dict()
    a, b = ([ids.tolist() for ids in features[key].to_dense()] for key in ("a", "b"))
    return list(zip(a, batch.dense_BF[:, 0].tolist(), b, strict=True))


id_lists = st.lists(st.integers(0, 99), max_size=5)
row_lists = st.lists(st.tuples(id_lists, st.integers(-9, 9).map(float), id_lists), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows=row_lists, data=st.data())
def test_a_slice_of_a_table_decodes_to_its_own_rows(rows, data):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    batch = batch_from_arrow(make_table(rows).slice(start, stop - start), SCHEMA)
    assert read_back(batch) == rows[start:stop]
    assert batch.label_B.tolist() == list(range(start, stop))


@settings(max_examples=60, deadline=None)
@given(rows=row_lists, data=st.data())
def test_a_batch_is_the_given_slices_in_the_given_order(rows, data):
    block = decode_block(make_table(rows), SCHEMA)
    bounds = st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows))).map(sorted)
    cuts = data.draw(st.lists(bounds, max_size=4))
    batch = assemble_batch([(block, start, stop) for start, stop in cuts], SCHEMA, num_global=99)
    assert read_back(batch) == [row for start, stop in cuts for row in rows[start:stop]]
    assert batch.num_global == 99
    assert batch.size_in_bytes() == sum(block.batch_bytes(start, stop) for start, stop in cuts)


def test_ids_are_key_major_in_schema_order():
    batch = batch_from_arrow(make_table([([7, 9], 0.0, []), ([4], 1.0, [3])]), SCHEMA)
    assert batch.ids.keys() == ["a", "b"]
    assert batch.ids.values().tolist() == [7, 9, 4, 3]
    assert batch.ids.lengths().tolist() == [2, 1, 0, 1]
    assert batch.ids.length_per_key() == [3, 1]
    assert batch.ids.values().dtype == torch.int64


def test_decoding_copies_no_ids():
    table = make_table([([1, 2], 0.0, [3])] * 50)
    block = decode_block(table, SCHEMA)
    for values, offsets, name in zip(block.values, block.offsets, ("a", "b"), strict=True):
        column = table.column(name).chunk(0)
        assert np.shares_memory(values, column.values.to_numpy())
        assert np.shares_memory(offsets, column.offsets.to_numpy())


def test_a_column_in_several_chunks_reads_like_one():
    parts = [make_table([([1], 0.5, [2, 3])]), make_table([([], 1.5, [4]), ([5, 6], 2.5, [])])]
    assert read_back(batch_from_arrow(pa.concat_tables(parts), SCHEMA)) == [
        ([1], 0.5, [2, 3]),
        ([], 1.5, [4]),
        ([5, 6], 2.5, []),
    ]


def test_other_widths_are_cast():
    rows = [([1], 1.0, [2]), ([3], 2.0, [4, 5])]
    table = make_table(
        rows,
        a=pa.array([1, 3], type=pa.int32()),
        x=pa.array([1, 2], type=pa.int64()),
        b=pa.array([[2], [4, 5]], type=pa.large_list(pa.uint16())),
        label=pa.array([True, False]),
    )
    batch = batch_from_arrow(table, SCHEMA)
    assert read_back(batch) == rows
    assert batch.label_B.tolist() == [1.0, 0.0]


def test_a_missing_list_is_empty_and_a_missing_dense_value_is_zero():
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], type=pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    table = make_table([([1], 1.0, [])] * 3, b=lists, x=pa.array([1.0, None, 3.0], type=pa.float32()))
    assert read_back(batch_from_arrow(table, SCHEMA)) == [([1], 1.0, [1, 2]), ([1], 0.0, []), ([1], 3.0, [5])]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("label", pa.array([1.0, None], type=pa.float32()), "column 'label', row 1: missing"),
        ("label", pa.array([float("nan"), 0.0], type=pa.float32()), "column 'label', row 0"),
        ("label", pa.array(["a", "b"]), "column 'label' is string, expected float32"),
        ("x", pa.array([0.0, float("inf")], type=pa.float32()), "column 'x', row 1: infinite"),
        ("x", pa.array(["a", "b"]), "column 'x' is string"),
        ("a", pa.array([[1], [2, None]], type=LISTS), "column 'a' holds 1 missing ids"),
        ("a", pa.array([[1, 2], [3, 100]], type=LISTS), r"column 'a', row 1: id 100 lies outside \[0, 100\)"),
        ("b", pa.array([[], [-1]], type=LISTS), r"column 'b', row 1: id -1"),
        ("b", pa.array([0.5, 0.5]), "column 'b' is double, expected list<int64>"),
        ("b", pa.array([["x"], []]), "column 'b' is list<.*string>, expected list<int64>"),
    ],
)
def test_wrong_values_are_named(column, values, message):
    table = make_table([([1], 1.0, [1]), ([1], 1.0, [1])], **{column: values})
    with pytest.raises(InputError, match=f"part.parquet: {message}"):
        batch_from_arrow(table, SCHEMA, where="part.parquet")


def test_a_missing_column_is_named():
    with pytest.raises(InputError, match="column 'b' is missing"):
        batch_from_arrow(make_table([([1], 1.0, [1])]).drop_columns(["b"]), SCHEMA)


def test_an_empty_batch_keeps_its_keys_and_widths():
    batch = assemble_batch([], SCHEMA, num_global=3)
    assert len(batch) == 0
    assert batch.dense_BF.shape == (0, 1)
    assert batch.ids.keys() == ["a", "b"]
    assert batch.ids.stride() == 0


def test_a_schema_may_have_dense_or_id_features_only():
    table = make_table([([1], 1.0, [1]), ([2], 2.0, [])])
    dense = batch_from_arrow(table, Schema(features=SCHEMA.dense))
    assert dense.ids.keys() == []
    assert dense.ids.stride() == len(dense) == 2
    ids = batch_from_arrow(table, Schema(features=SCHEMA.id_features))
    assert ids.dense_BF.shape == (2, 0)
    assert ids.ids.values().tolist() == [1, 2, 1]


def test_moving_a_batch_keeps_its_content():
    batch = batch_from_arrow(make_table([([7, 9], 0.0, []), ([4], 1.0, [3])]), SCHEMA)
    moved = batch.to("cpu")
    assert read_back(moved) == read_back(batch)
    assert (len(moved), moved.num_global) == (2, 2)
    assert batch.to("meta").dense_BF.device.type == "meta"


def test_an_expanded_block_has_the_list_of_every_sample():
    def group(key, values, starts, lengths, inverse=None):
        return DistinctGroup(
            keys=(key,),
            values=(np.array(values),),
            starts_FU=np.array([starts]),
            lengths_FU=np.array([lengths], np.int32),
            inverse_R=None if inverse is None else np.array(inverse, np.int32),
        )

    expected = {"again": [[7, 9], [7, 9], [4]], "window": [[1, 2], [2, 3], [2, 3]], "own": [[5], [], [6, 8]]}
    block = DistinctBlock(
        dense_RF=np.zeros((3, 0), np.float32),
        label_RT=np.zeros((3, 1), np.float32),
        groups=(
            group("again", [7, 9, 4], [0, 2], [2, 1], [0, 0, 1]),
            group("window", [1, 2, 3], [0, 1], [2, 2], [0, 1, 1]),
            group("own", [5, 6, 8], [0, 1, 1], [1, 0, 2]),
        ),
    )
    rows = expand_block(block, ["own", "again", "window"])
    for key, values, offsets in zip(("own", "again", "window"), rows.values, rows.offsets, strict=True):
        assert [values[start:stop].tolist() for start, stop in pairwise(offsets)] == expected[key]
    assert rows.num_values_R.tolist() == [0, 5, 9, 14]
    schema = Schema(features=tuple(Feature(name=key, kind="sparse", num_rows=9, dim=4) for key in expected))
    with pytest.raises(InputError, match=r"here: column 'again', row 0: id 9 lies outside \[0, 9\)"):
        expand_block(block, ["own", "again", "window"], schema=schema, where="here")
