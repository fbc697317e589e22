import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.data.schema import Feature, Schema


def make_schema(**options):
    features = [
        Feature(name=name, kind="sparse", num_rows=1000, dim=4, **options.get(name, {})) for name in ("a", "b", "c")
    ]
    return Schema(features=(Feature(name="age", kind="dense"), *features))


def rows_of(ikjt):
    kjt = ikjt.to_kjt()
    keys = kjt.keys()
    return {key: [row.tolist() for row in kjt[key].to_dense()] for key in keys}


LISTS = {"a": [[1, 2], [1, 2], []], "b": [[3], [3], [3]], "c": [[7], [8], [9]]}


def test_groups_and_windows_come_from_the_schema():
    lists = {**LISTS, "c": [[7, 8, 9], [8, 9, 10], [9, 10, 11]]}
    schema = make_schema(a={"group": "user"}, b={"group": "user"}, c={"shift": True})
    batch = pa.RecordBatch.from_pydict(lists)
    ikjt = InverseKeyedJaggedTensor.from_arrow(batch, schema)
    assert ikjt.keys() == ["a", "b", "c"]
    assert ikjt.groups == [["a", "b"], ["c"]]
    assert ikjt.inverse(0).tolist() == [0, 0, 1]
    assert ikjt.windows("c")[0].tolist() == [7, 8, 9, 10, 11]
    assert rows_of(ikjt) == lists
    assert ikjt.to_kjt().lengths().dtype == torch.int32


def test_given_groups_win_over_the_schema():
    schema = make_schema(a={"group": "user"}, b={"group": "user"})
    ikjt = InverseKeyedJaggedTensor.from_arrow(pa.table(LISTS), schema, groups=[["b", "c"], ["a"]])
    assert ikjt.groups == [["b", "c"], ["a"]]
    assert rows_of(ikjt) == LISTS


LIST_TYPES = [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int32())]


@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=8),
    skip=st.integers(0, 3),
    cut=st.integers(0, 8),
    kind=st.sampled_from(LIST_TYPES),
)
@settings(max_examples=100, deadline=None)
def test_slices_and_chunks_of_any_list_type_read_the_same(rows, skip, cut, kind):
    schema = Schema(features=(Feature(name="a", kind="sparse", num_rows=9, dim=4, shift=True),))
    column = pa.array(rows, type=kind)
    cut = min(cut, len(rows))
    whole = pa.table({"a": pa.chunked_array([column.slice(0, cut), column.slice(cut)], type=kind)}).slice(skip)
    assert rows_of(InverseKeyedJaggedTensor.from_arrow(whole, schema)) == {"a": rows[skip:]}
    batch = pa.RecordBatch.from_arrays([column.slice(skip)], ["a"])
    assert rows_of(InverseKeyedJaggedTensor.from_arrow(batch, schema)) == {"a": rows[skip:]}


def test_single_ids_and_fixed_lists_read_as_lists():
    columns = {
        "a": pa.array([4, 4, 5]),
        "b": pa.array([[0, 0], [1, 2], [1, 2], [3, 4]], type=pa.list_(pa.int64(), 2)).slice(1),
        "c": pa.array([[7], [8], [9]]),
    }
    ikjt = InverseKeyedJaggedTensor.from_arrow(pa.table(columns), make_schema())
    assert rows_of(ikjt) == {"a": [[4], [4], [5]], "b": [[1, 2], [1, 2], [3, 4]], "c": [[7], [8], [9]]}


def test_an_absent_list_is_an_empty_one():
    table = pa.table({**LISTS, "a": pa.array([None, [1, 2], None, [3]]).slice(1)})
    assert rows_of(InverseKeyedJaggedTensor.from_arrow(table, make_schema()))["a"] == [[1, 2], [], [3]]


def test_plain_columns_are_read_where_they_are():
    column = pa.array([[n] for n in range(50)])
    schema = Schema(features=(Feature(name="a", kind="sparse", num_rows=99, dim=4),))
    ikjt = InverseKeyedJaggedTensor.from_arrow(pa.table({"a": column}), schema)
    assert ikjt.is_plain(0)
    assert ikjt.group_kjt(0).values().data_ptr() == column.values.buffers()[1].address


def test_wrong_columns_are_named():
    schema = make_schema()
    with pytest.raises(InputError, match="column 'c' is missing; the batch has a, b"):
        InverseKeyedJaggedTensor.from_arrow(pa.table({"a": LISTS["a"], "b": LISTS["b"]}), schema)
    with pytest.raises(InputError, match=r"column 'b' is list<.*string>, expected list<int64>"):
        InverseKeyedJaggedTensor.from_arrow(pa.table({**LISTS, "b": [["x"], ["x"], []]}), schema)
    with pytest.raises(InputError, match="column 'b', row 2: holds a missing id"):
        InverseKeyedJaggedTensor.from_arrow(pa.table({**LISTS, "b": [[], [3, 4], [1, None]]}), schema)
