"""Schemas survive being saved, and whatever is wrong with one is said by InputError."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.schema import KEY_COLUMNS, Feature, Schema

names = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=8).filter(
    lambda name: name not in KEY_COLUMNS
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    features = []
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        kind = draw(st.sampled_from(["dense", "sparse", "sequence"]))
        shape = {"num_rows": draw(st.integers(1, 10**12)), "dim": draw(st.integers(1, 512))} if kind != "dense" else {}
        group = draw(st.sampled_from(["", "user"]))
        features.append(Feature(name=name, kind=kind, group=group, shift=draw(st.booleans()), **shape))
    times = st.integers(-(10**12), 10**12)
    held_out = names.filter(lambda name: name != "train")
    splits = dict(draw(st.lists(st.tuples(held_out, times), max_size=3, unique_by=(lambda s: s[0], lambda s: s[1]))))
    return Schema(features=tuple(features), splits=splits, info=draw(st.dictionaries(names, json_values, max_size=2)))


@settings(max_examples=60, deadline=None)
@given(schema=schemas())
def test_a_saved_schema_loads_as_it_was(tmp_path_factory: pytest.TempPathFactory, schema: Schema) -> None:
    folder = tmp_path_factory.mktemp("schema")
    schema.save(folder)
    loaded = Schema.load(folder)
    assert loaded == schema
    assert list(loaded.splits) == list(schema.splits)
    assert Schema.load(folder / "schema.json") == schema
    assert [path.name for path in folder.iterdir()] == ["schema.json"]


@settings(max_examples=150, deadline=None)
@given(schema=schemas(), data=st.data())
def test_a_corrupted_schema_loads_or_raises_input_error(schema: Schema, data: st.DataObject) -> None:
    """Change one value anywhere in the JSON: never another exception than InputError, always in one line."""
    loaded = json.loads(json.dumps(schema.to_json()))
    corrupt(loaded, data)
    message = ""
    try:
        Schema.from_json(loaded, where="s.json")
    except InputError as error:
        message = str(error)
    assert message == "" or message.startswith("s.json: ")
    assert "\n" not in message


def corrupt(value: Any, data: st.DataObject) -> None:
    """Replace, remove or add one entry at a random place of a JSON object."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(value[key], dict | list) and value[key] and data.draw(st.booleans()):
            value = value[key]
            continue
        if data.draw(st.booleans()):
            value[key] = data.draw(json_values)
        else:
            del value[key]
        return


def schema_json(**changes: Any) -> dict[str, Any]:
    feature = {"name": "tags", "kind": "sparse", "num_rows": 10, "dim": 4, **changes}
    return {"format_version": 1, "features": [feature, {"name": "age", "kind": "dense"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "embedding"}, "kind is 'embedding', expected one of dense, sparse, sequence"),
        ({"name": "label"}, "the name belongs to a key column"),
        ({"name": "a/b"}, "must not contain '/'"),
        ({"name": ""}, "must be a non-empty string"),
        ({"num_rows": 0}, "must be at least 1, received 0"),
        ({"num_rows": -3}, "features[0].num_rows is -3, expected a whole number"),
        ({"num_rows": 2.5}, "features[0].num_rows is 2.5, expected a whole number"),
        ({"dim": True}, "features[0].dim is True, expected a whole number"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"pooling": "attention"}, "a sparse feature is pooled by sum or mean"),
        ({"shift": "yes"}, "shift is 'yes', expected true or false"),
        ({"colour": "red"}, "unknown keys colour"),
        ({"name": "age"}, "'age' is listed 2 times"),
    ],
)
def test_what_is_wrong_with_a_feature_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Schema.from_json(schema_json(**changes), where="s.json")
    assert message in str(error.value)


def test_tables_shared_by_features_must_agree_on_their_shape() -> None:
    loaded = schema_json(table="items")
    loaded["features"].append({"name": "history", "kind": "sequence", "table": "items", "num_rows": 11, "dim": 4})
    with pytest.raises(InputError, match="table 'items': 'tags' says 10 rows of 4, 'history' says 11 of 4"):
        Schema.from_json(loaded)


def test_another_version_is_refused(tmp_path: Path) -> None:
    for version in (0, 2, "1", None):
        (tmp_path / "schema.json").write_text(json.dumps({**schema_json(), "format_version": version}))
        with pytest.raises(InputError, match=r"schema\.json: format_version is .*, this recmill reads 1"):
            Schema.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"format_version": NaN}', '{"format_version": 1}', '{"format_version": 1, "features": []}'],
)
def test_files_that_are_no_schema_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "schema.json").write_text(text)
    with pytest.raises(InputError, match=r"schema\.json"):
        Schema.load(tmp_path)


def test_splits_come_in_the_order_of_their_times() -> None:
    loaded = {**schema_json(), "splits": {"test": 20, "valid": 10}}
    assert list(Schema.from_json(loaded).splits) == ["valid", "test"]
    for wrong in ({"train": 5}, {"test": "noon"}, {"test": 1.5}, {"a": 3, "b": 3}, [1]):
        with pytest.raises(InputError, match="splits"):
            Schema.from_json({**copy.deepcopy(loaded), "splits": wrong})


def test_columns_and_types_follow_the_contract() -> None:
    schema = Schema.from_json(schema_json())
    assert schema.columns == ["session_id", "timestamp", "label", "tags", "age"]
    types = [pa.int64(), pa.int64(), pa.float32(), pa.list_(pa.int64()), pa.float32()]
    assert schema.arrow_schema().types == types


def test_remote_schemas_work() -> None:
    schema = Schema.from_json(schema_json())
    schema.save("memory://schema-test")
    assert Schema.load("memory://schema-test") == schema


def items(*names: str, target: str = "", **history: Any) -> Schema:
    shape = {"table": "items", "num_rows": 9, "dim": 4}
    features = [Feature(name=name, kind="sparse", **shape) for name in names]
    features.append(Feature(name="other", kind="sparse", num_rows=9, dim=history.pop("other_dim", 4)))
    features.append(Feature(name="seen", kind="sequence", target=target, **shape))
    return Schema(features=tuple(features))


def test_the_target_of_a_history_is_the_sparse_feature_of_its_table() -> None:
    schema = items("item")
    assert schema.target_of(schema.feature("seen")).name == "item"
    assert "target" not in schema.to_json()["features"][2]


def test_a_target_may_be_named_and_is_saved(tmp_path: Path) -> None:
    schema = items("item", "shown", target="other")
    schema.save(tmp_path)
    loaded = Schema.load(tmp_path)
    assert loaded == schema
    assert loaded.target_of(loaded.feature("seen")).name == "other"


@pytest.mark.parametrize(
    ("schema", "found"), [(items(), "none"), (items("item", "shown"), "item, shown")], ids=["none", "two"]
)
def test_a_history_without_one_target_is_named(schema: Schema, found: str) -> None:
    with pytest.raises(InputError, match=f"'seen': expected one sparse feature of table 'items'.* found {found};"):
        schema.target_of(schema.feature("seen"))


def test_targets_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="unknown feature 'nothing'"):
        items("item", target="nothing")
    with pytest.raises(InputError, match="target 'seen' must be a sparse feature of dim 4"):
        items("item", target="seen")
    with pytest.raises(InputError, match="target 'other' must be a sparse feature of dim 4"):
        items("item", target="other", other_dim=8)
    with pytest.raises(InputError, match="only a sequence feature has a target"):
        Feature(name="item", kind="sparse", num_rows=9, dim=4, target="other")


def test_user_and_item_name_sparse_features(tmp_path: Path) -> None:
    features = (Feature(name="u", kind="sparse", num_rows=3, dim=4), Feature(name="age", kind="dense"))
    schema = Schema(features=features, user="u")
    schema.save(tmp_path)
    assert Schema.load(tmp_path) == schema
    assert "item" not in json.loads((tmp_path / "schema.json").read_text())
    assert (schema.select(["u"]).user, schema.select(["age"]).user) == ("u", "")
    for wrong in ("age", "unknown"):
        with pytest.raises(InputError, match=f"item is '{wrong}', expected the name of a sparse feature"):
            Schema(features=features, item=wrong)
