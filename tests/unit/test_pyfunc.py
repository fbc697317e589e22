"""What MLflow's wrapper of an exported model refuses."""

from __future__ import annotations

import copy

import pytest

from recmill.tracking.pyfunc import SIGNATURE_TYPES, ServedValues, check_types

GOOD = {
    "sha256": "sha256:0",
    "dense": ["age"],
    "dense_values": {"age": {"null_value": None, "transform": ["log1p"], "mean": 0.0, "scale": 1.0, "fill": 0}},
    "ids": [{"name": "item", "table": "item", "num_rows": 7, "max_length": 20, "padding": -1}],
    "tables": {"item": {"num_hashed": 0, "file": "item.parquet", "sha256": "sha256:1"}},
    "labels": ["label"],
}


def test_a_signature_as_export_writes_it_passes():
    check_types(GOOD, SIGNATURE_TYPES, "signature.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("dense_values",), ""),
        (("dense_values", "age", "transform"), 3),
        (("ids",), {}),
        (("ids", 0), "item"),
        (("ids", 0, "max_length"), None),
        (("ids", 0, "num_rows"), True),
        (("tables", "item", "num_hashed"), "1"),
        (("labels", 0), 1),
        (("ids", 0, "num_rows"), 2**70),
        (("dense_values", "age", "mean"), 10**400),
        (("dense_values", "age", "scale"), float("nan")),
    ],
)
def test_a_value_of_another_type_or_range_is_named(path, value):
    changed, holder = changed_at(path)
    holder[path[-1]] = value
    with pytest.raises(ValueError, match=rf"signature\.json: .*{path[-1]}.* expected another type or range"):
        check_types(changed, SIGNATURE_TYPES, "signature.json")


@pytest.mark.parametrize("path", [("labels",), ("ids", 0, "table"), ("dense_values", "age", "fill")])
def test_a_key_that_is_missing_is_named(path):
    changed, holder = changed_at(path)
    del holder[path[-1]]
    with pytest.raises(ValueError, match=rf"signature\.json.*: {path[-1]} is missing"):
        check_types(changed, SIGNATURE_TYPES, "signature.json")


@pytest.mark.parametrize("path", [("tables",), ("dense_values",), ("tables", "item", "file")])
def test_what_older_or_hashed_tables_lack_may_be_missing(path):
    changed, holder = changed_at(path)
    del holder[path[-1]]
    check_types(changed, SIGNATURE_TYPES, "signature.json")


def test_a_vocabulary_outside_its_folder_is_refused(tmp_path):
    (tmp_path / "outside.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"names '\.\./outside\.parquet', expected a file of the vocabulary"):
        ServedValues({"num_hashed": 0, "file": "../outside.parquet", "sha256": ""}, str(tmp_path / "vocabulary"))


def changed_at(path):
    """A copy of the good signature, and the object in it that holds the last key of a path."""
    changed = copy.deepcopy(GOOD)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    return changed, holder
