"""The deduplicated layout gives back the rows of the session layout, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import Dataset, InputError
from recmill.artifacts.manifest import sign_manifest
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import load_encoding, read_rows, read_table
from recmill.data.schema import Feature, Schema
from recmill.data.storage.deduplicated import decode_distinct, decode_rows
from recmill.data.storage.encoding import Encoding, FeatureEncoding, TimeEncoding, choose_encoding
from recmill.data.storage.numbers import NumberCode
from recmill.data.storage.session_encoder import encode_sessions
from tests.raw_logs import lists_of, random_log, write_log

SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense", group="user"),
        Feature(name="price", kind="dense"),
        Feature(name="tags", kind="sparse", num_rows=9, dim=4, group="user"),
        Feature(name="places", kind="sparse", num_rows=9, dim=4, group="user"),
        Feature(name="item", kind="sparse", table="items", num_rows=9, dim=4),
        Feature(name="history", kind="sequence", table="items", num_rows=9, dim=4, shift=True),
    )
)
# Every way to store a feature, whatever the rows would suggest.
STORED = Encoding(
    features={
        "age": FeatureEncoding(group="age"),
        "price": FeatureEncoding(),
        "tags": FeatureEncoding(group="tags"),
        "places": FeatureEncoding(group="tags"),
        "item": FeatureEncoding(),
        "history": FeatureEncoding(group="history", windows=True),
    }
)
SHARED = Encoding(features={**STORED.features, "history": replace(STORED.features["history"], shared_by="tags")})
SMALLEST = Encoding(
    features={
        "age": FeatureEncoding(group="age", marks_firsts=True),
        "price": FeatureEncoding(),
        "tags": FeatureEncoding(group="tags", placed=True),
        "places": FeatureEncoding(group="tags"),
        "item": FeatureEncoding(follows="history"),
        "history": FeatureEncoding(group="history", windows=True, shared_by="tags", splits_ends=True),
    },
    times=TimeEncoding(first_coded=True, gaps_coded=True, split_by="age", divisor=1_000),
)
small_list = st.lists(st.integers(0, 8), max_size=3)
sample = st.fixed_dictionaries(
    {
        "session_id": st.integers(-2, 3),
        "timestamp": st.integers(-(2**40), 2**40),
        "label": st.sampled_from([0.0, 1.0, 0.25]),
        "age": st.sampled_from([0.0, -0.0, 1.5]),
        "price": st.floats(-1, 1, width=32),
        "tags": st.sampled_from([[], [1], [1, 2], [2, 1]]),
        "places": st.sampled_from([[], [3]]),
        "item": small_list,
        "history": st.one_of(small_list, st.sampled_from([[1, 2, 3], [2, 3, 4], [0, 1, 2], [3, 4, 5]])),
    }
)


def as_rows(samples: list[dict[str, Any]]) -> pa.Table:
    table = pa.Table.from_pylist(samples, schema=SCHEMA.arrow_schema())
    return table.sort_by([("session_id", "ascending"), ("timestamp", "ascending")]).combine_chunks()


def bits(table: pa.Table) -> list[Any]:
    """What tells apart 0.0 and -0.0."""
    floats = {name: table.column(name).to_numpy().tobytes() for name in ("label", "age", "price")}
    return [floats, table.to_pylist(), table.schema]


@settings(max_examples=150, deadline=None)
@given(st.lists(sample, min_size=1, max_size=25), st.sampled_from([None, STORED, SHARED, SMALLEST]))
def test_any_rows_come_back(samples: list[dict[str, Any]], given_encoding: Encoding | None) -> None:
    rows = as_rows(samples)
    encoding = given_encoding or choose_encoding(rows, SCHEMA)
    codes = {}
    if encoding.times.first_coded:  # by a code that knows few of the numbers
        codes = dict.fromkeys(["timestamp/first", "timestamp/gaps"], NumberCode.choose(np.array([0, 1, 300, 70_000])))
    records = encode_sessions(rows, SCHEMA, encoding, codes=codes)
    assert records.num_rows == 1
    assert len(records.column("session_id")[0]) == len({row["session_id"] for row in samples})
    records.validate(full=True)
    assert bits(pa.Table.from_batches([decode_rows(records, SCHEMA, encoding)])) == bits(rows)
    block = decode_distinct(records, SCHEMA, encoding)
    assert block.label_RT[:, 0].tolist() == rows.column("label").to_pylist()
    for position, name in enumerate(("age", "price")):
        assert block.dense_RF[:, position].tobytes() == rows.column(name).to_numpy().tobytes()
    found = {}
    for group in block.groups:
        at = np.arange(len(block)) if group.inverse_R is None else group.inverse_R
        for key, values, starts, lengths in group.features():
            found[key] = [values[starts[u] : starts[u] + lengths[u]].tolist() for u in at]
    assert found == {name: rows.column(name).to_pylist() for name in ("tags", "places", "item", "history")}


def test_a_record_reads_as_the_module_draws_it() -> None:
    schema = Schema(
        features=(
            Feature(name="tags", kind="sparse", num_rows=10, dim=4),
            Feature(name="item", kind="sparse", num_rows=10, dim=4),
            Feature(name="history", kind="sequence", num_rows=10, dim=4, shift=True),
        )
    )
    columns = {
        "session_id": [17] * 4 + [18],
        "timestamp": [1000, 1020, 1025, 1115, 1010],
        "label": [0.0, 1.0, 0.0, 0.0, 1.0],
        "tags": [[7, 9], [7, 9], [4], [7, 9], [4]],
        "item": [[1], [5], [2], [3], [1]],
        "history": [[1, 2, 3], [1, 2, 3], [2, 3, 4], [3, 4, 5], [8, 9]],
    }
    encoding = Encoding(
        features={
            "tags": FeatureEncoding(group="tags"),
            "item": FeatureEncoding(),
            "history": FeatureEncoding(group="history", windows=True),
        }
    )
    rows = pa.table(columns, schema=schema.arrow_schema())
    assert encode_sessions(rows, schema, encoding).to_pylist() == [
        {
            "session_id": [17, 18],
            "session/num_rows": [4, 1],
            "timestamp/first": [1000, 1010],
            "timestamp/gaps": [20, 5, 90],
            "label": [0.0, 1.0, 0.0, 0.0, 1.0],
            "tags/changed": [False, True, True],
            "tags/again": [0, 1],
            "tags": [7, 9, 4, 4],
            "tags/lengths": [2, 1, 1],
            "item": [1, 5, 2, 3, 1],
            "item/lengths": [1],
            "history/changed": [False, True, True],
            "history/again": [],
            "history": [1, 2, 3, 4, 5, 8, 9],
            "history/ends": [3, 1, 1, 2],
            "history/lengths": [3],  # or shorter, where the sequence has not come so far
        }
    ]


@pytest.mark.parametrize("is_newest_first", [False, True])
def test_histories_that_grow_at_either_end_are_stored_once(is_newest_first: bool) -> None:
    stream = np.arange(60)
    lists = [stream[at : at + 8].tolist() for session in (0, 25) for at in range(session, session + 10)]
    samples = [
        {
            "session_id": number // 10,
            "timestamp": number,
            "label": 0.0,
            "age": 0.0,
            "price": 0.0,
            "tags": [],
            "places": [],
            "item": [],
            "history": own[::-1] if is_newest_first else own,
        }
        for number, own in enumerate(lists)
    ]
    records = encode_sessions(as_rows(samples), SCHEMA, STORED)
    assert len(records.column("history")[0]) == 17 + 17  # of each session 8, then one more a sample


def test_features_share_an_inverse_if_they_change_together() -> None:
    rng = np.random.default_rng(0)
    num_rows, session = 400, np.arange(400) // 20
    half = np.arange(400) // 10
    columns = {
        "session_id": session,
        "timestamp": np.arange(num_rows),
        "label": np.zeros(num_rows, np.float32),
        "age": session.astype(np.float32),
        "price": rng.random(num_rows).astype(np.float32),
        "tags": lists_of([[int(own % 9), int(own % 7)] for own in session]),
        "places": lists_of([[int(own % 9)] for own in half]),
        "item": lists_of([[int(own)] for own in rng.integers(0, 9, num_rows)]),
        "history": lists_of([[0, 1]] * num_rows),
    }
    encoding = choose_encoding(pa.table(columns, schema=SCHEMA.arrow_schema()), SCHEMA)
    assert encoding.groups == {"age": ["age", "tags", "history"], "places": ["places"]}
    assert encoding.plain == ["price", "item"]
    loaded = Encoding.from_json(json.loads(json.dumps(encoding.to_json())), SCHEMA, where="here")
    assert loaded == encoding


@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.integers(1, 200),
    num_sessions=st.integers(1, 40),
    rows_per_group=st.integers(1, 50),
    max_time=st.sampled_from([1, 10_000]),
    eval_fraction=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 5),
)
def test_three_layouts_hold_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, num_rows, num_sessions, rows_per_group, max_time, eval_fraction, seed
) -> None:
    tmp_path = tmp_path_factory.mktemp("layouts")
    log = random_log(num_rows, num_sessions=num_sessions, max_time=max_time, seed=seed)
    raw = write_log(tmp_path / "raw", log)
    options = {"rows_per_group": rows_per_group, "rows_per_part": 60}
    if len(set(log.column("session_id").to_pylist())) > 1:
        options["eval_fraction"] = eval_fraction
    time, session, deduplicated = (
        cluster_sessions(raw, out=tmp_path / layout, layout=layout, **options)
        for layout in ("time", "session", "deduplicated")
    )
    for split in session.splits:
        assert read_table(deduplicated, split=split).equals(read_table(session, split=split))
    everything = read_table(time).to_pylist()
    assert sorted(map(repr, everything)) == sorted(map(repr, read_table(deduplicated).to_pylist()))
    assert [part.row_group_rows for part in deduplicated.parts] == [p.row_group_rows for p in session.parts]
    assert deduplicated.num_sessions == session.num_sessions == time.num_sessions


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    raw = write_log(tmp_path / "raw", random_log(200))
    return cluster_sessions(raw, out=tmp_path / "out", layout="deduplicated", rows_per_group=20, rows_per_part=60)


def test_columns_and_row_groups_can_be_chosen(dataset: Dataset) -> None:
    whole = read_table(dataset)
    for columns in (["history", "session_id"], ["timestamp"], ["age", "label"]):
        assert read_table(dataset, columns=columns).equals(whole.select(columns))
    part = dataset.parts[1]
    (batch,) = read_rows(dataset, row_groups={part.file: [1]})
    before = dataset.parts[0].num_rows + part.row_group_rows[0]
    assert batch.to_pylist() == whole.slice(before, part.row_group_rows[1]).to_pylist()


def test_an_encoding_that_does_not_fit_the_schema_is_refused(dataset: Dataset) -> None:
    manifest = Path(dataset.path) / "dataset.json"
    loaded = json.loads(manifest.read_text())
    features = loaded["encoding"]["features"]
    del features["tags"]
    manifest.write_text(json.dumps(sign_manifest(loaded)))
    with pytest.raises(InputError, match=r"encoding.tags is None, expected an object"):
        load_encoding(Dataset.load(dataset.path))
    features["tags"] = {"group": "colour", "windows": False, "coded": False, "shared_by": ""}
    manifest.write_text(json.dumps(sign_manifest(loaded)))
    with pytest.raises(InputError, match=r"encoding.tags is .*expected names of features"):
        list(read_rows(dataset.path))


@pytest.mark.parametrize(
    ("feature", "change", "complaint"),
    [
        ("item", {"follows": "tags"}, "encoding.item follows 'tags', expected a shared history"),
        ("places", {"placed": True}, "encoding.places is placed, expected a feature that shares a history"),
    ],
)
def test_an_encoding_that_refers_to_a_wrong_feature_is_refused(
    feature: str, change: dict[str, Any], complaint: str
) -> None:
    features = {**SMALLEST.features, feature: replace(SMALLEST.features[feature], **change)}
    with pytest.raises(InputError, match=complaint):
        Encoding.from_json(replace(SMALLEST, features=features).to_json(), SCHEMA, where="dataset.json")


def test_gaps_split_by_an_unknown_group_are_refused() -> None:
    wrong = replace(SMALLEST, times=TimeEncoding(split_by="item"))
    with pytest.raises(InputError, match=r"encoding.times.split_by is 'item', expected a group"):
        Encoding.from_json(wrong.to_json(), SCHEMA, where="dataset.json")
    assert Encoding.from_json(SMALLEST.to_json(), SCHEMA, where="dataset.json") == SMALLEST


def test_the_encoding_of_format_2_is_read() -> None:
    names = ("group", "windows", "coded", "shared_by")
    features = {name: {key: getattr(own, key) for key in names} for name, own in SHARED.features.items()}
    assert Encoding.from_json({"format": 2, "features": features}, SCHEMA, where="dataset.json") == SHARED


def test_a_dataset_of_an_older_format_is_refused_in_one_sentence(dataset: Dataset) -> None:
    manifest = Path(dataset.path) / "dataset.json"
    loaded = json.loads(manifest.read_text())
    loaded["encoding"] = loaded["encoding"]["features"]  # as format 1 stored it, whose footers are other text
    manifest.write_text(json.dumps(sign_manifest(loaded)))
    with pytest.raises(InputError, match=r"dataset.json: .* another version of recmill, .* cluster the log again"):
        list(read_rows(dataset.path))
