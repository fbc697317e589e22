"""Calls become batches; every mistake is one sentence that names the field."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recmill.artifacts import InputError
from recmill.data.vocabulary import Vocabulary, hash_value
from recmill.serving.server.errors import BadRequest, CallError, TooLarge
from recmill.serving.server.ids import VocabularyRows
from recmill.serving.server.instances import instance_tensors, predictions
from recmill.serving.server.tensors import CallTensor
from recmill.serving.server.versions import ServedVersion, load_version
from tests.unit.serving.server.served_models import write_served_model

AGES = CallTensor(name="age", datatype="FP32", shape=[2], data=[30.0, 40.0])
PRICES = CallTensor(name="price", datatype="FP64", shape=[3, 1], data=[[1.0], [2.0], [500.0]])
COUNTS = CallTensor(name="candidates", datatype="INT64", shape=[2], data=[2, 1])
GOOD = (COUNTS, AGES, PRICES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    return load_version(write_served_model(tmp_path_factory.mktemp("plain") / "model"), max_candidates=50)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    folder = write_served_model(tmp_path_factory.mktemp("named") / "model", vocabulary=True)
    return load_version(folder, max_candidates=50)


def ids(name: str, data: Any, shape: list[int] | None = None, kind: str = "INT64") -> CallTensor:
    return CallTensor(name=name, datatype=kind, shape=shape or [len(data)], data=data)


def lists_of(entry: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    values, offsets = entry
    return [part.tolist() for part in np.split(values, offsets[1:-1])]


def test_tensors_become_a_batch_in_all_three_forms_of_lists(plain: ServedVersion) -> None:
    batch, unknown = plain.reader.read(
        [
            *GOOD,
            ids("item", [5, -1, 7]),  # one per row; -1: none
            ids("seen", [[1, 2], [3, -1]], [2, 2]),  # padded
            ids("words", [4, 4, 9, 1]),
            ids("words.lengths", [3, 0, 1]),
        ]
    )
    assert batch.counts_R.tolist() == [2, 1]
    assert batch.dense_user_RF.tolist() == [[30.0], [40.0]]
    assert batch.dense_candidate_NF.tolist() == [[1.0], [2.0], [100.0]]  # the schema clips prices
    assert lists_of(batch.candidate_ids["item"]) == [[5], [], [7]]
    assert lists_of(batch.user_ids["seen"]) == [[1, 2], [3]]
    assert lists_of(batch.user_ids["city"]) == [[], []]  # left out
    assert [len(own) for own in lists_of(batch.candidate_ids["words"])] == [2, 0, 1]  # the schema takes the first two
    assert not unknown
    assert len(plain.model.score(batch)) == 3


def test_rows_that_a_table_lacks_get_the_unknown_row_and_are_counted(plain: ServedVersion) -> None:
    batch, unknown = plain.reader.read([*GOOD, ids("item", [5, 8, -3])])
    assert lists_of(batch.candidate_ids["item"]) == [[5], [0], [0]]
    assert unknown == {"item": 2}


def test_ids_are_values_where_the_model_has_a_vocabulary(named: ServedVersion) -> None:
    batch, unknown = named.reader.read(
        [
            *GOOD,
            ids("item", ["sku-3", "", "sku-99"], kind="BYTES"),
            ids("city", [12, -7]),
            ids("seen", [b"sku-1", b"sku-4", b"sku-1-and-much-longer"], kind="BYTES"),
            ids("seen.lengths", [2, 1]),
        ]
    )
    assert lists_of(batch.candidate_ids["item"]) == [[3], [], [0]]
    assert lists_of(batch.user_ids["city"]) == [[2], [1]]
    assert lists_of(batch.user_ids["seen"]) == [[1, 4], [0]]
    assert unknown == {"item": 1, "seen": 1}


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("rare_rows", [0, 2])
def test_a_request_finds_the_rows_that_the_vocabulary_finds(rare_rows: int, long: bool) -> None:
    values = [*(f"v{number}" for number in range(100)), "é", *(["x" * 80] if long else [])]
    rows = np.random.default_rng(0).permutation(len(values)) + 3
    vocabulary = Vocabulary(values=pa.array(values), own_rows=rows, since=np.ones(len(values)), rare_rows=rare_rows)
    asked = ["v7", "v100", "é", "", "v7\0", "x" * 80, "v99", 5]
    found, num_unknown = VocabularyRows(vocabulary).find(asked)
    assert found.tolist() == vocabulary.rows(asked).tolist()
    assert num_unknown == vocabulary.count_unknown(asked)


def test_a_vocabulary_of_numbers_takes_numbers_and_texts() -> None:
    vocabulary = Vocabulary(values=pa.array([40, -2, 9]), own_rows=np.array([1, 2, 3]), since=np.ones(3))
    finder = VocabularyRows(vocabulary)
    assert finder.find(np.array([9, 40, 8]))[0].tolist() == [3, 1, 0]
    found, num_unknown = finder.find(["-2", "x", str(2**70), b"40"])
    assert found.tolist() == [2, 0, 0, 1]
    assert num_unknown == 2


def test_raw_bytes_are_read_as_lists_are(named: ServedVersion) -> None:
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"sku-1", b"", b"sku-2"))
    raw = (
        CallTensor(name="candidates", datatype="INT32", shape=[1], data=np.array([3], np.int32).tobytes()),
        CallTensor(name="age", datatype="FP32", shape=[1], data=np.array([1], np.float32).tobytes()),
        CallTensor(name="price", datatype="FP16", shape=[3], data=np.array([1, 2, 3], np.float16).tobytes()),
        CallTensor(name="item", datatype="BYTES", shape=[3], data=texts),
    )
    batch, _ = named.reader.read(raw)
    assert lists_of(batch.candidate_ids["item"]) == [[1], [], [2]]
    assert batch.dense_candidate_NF.ravel().tolist() == [1, 2, 3]


def test_one_request_needs_no_counts(plain: ServedVersion) -> None:
    batch, _ = plain.reader.read([ids("age", [30.0], kind="FP32"), ids("price", [1, 2, 3])])
    assert batch.counts_R.tolist() == [3]


MISTAKES = {
    "unknown name": (ids("prise", [1]), "prise"),
    "twice": (ids("age", [1]), "age"),
    "lengths alone": (ids("seen.lengths", [1, 1]), "seen.lengths"),
    "negative length": (ids("city.lengths", [3, -1]), "city.lengths"),
    "rows": (ids("item", [1, 2]), "item"),
    "texts without vocabulary": (ids("item", ["a", "b", "c"], kind="BYTES"), "item"),
    "fractions": (ids("item", [1.5, 2, 3], kind="INT64"), "item"),
    "fractions as such": (ids("item", [1.5, 2, 3], kind="FP32"), "item"),
    "ragged": (ids("item", [[1], [2, 3]], [3]), "item"),
    "no numbers": (ids("item", [None, {}, "x"]), "item"),
    "too large": (ids("item", [2**63, 1, 1]), "item"),
    "unsigned": (ids("item", [2**63, 1, 1], kind="UINT64"), "item"),
    "out of its type": (ids("item", [300, 1, 1], kind="INT8"), "item"),
    "size": (ids("item", [1, 2, 3, 4], [3]), "item"),
    "shape": (ids("item", [1, 2, 3], [3, 1, 1]), "item"),
    "negative shape": (ids("item", [1, 2, 3], [-3]), "item"),
    "odd shape": (CallTensor(name="item", datatype="INT64", shape=["3"], data=[1, 2, 3]), "item"),  # type: ignore[list-item]
    "datatype": (ids("item", [1, 2, 3], kind="INT65"), "item"),
    "numbers as texts": (ids("item", [1, 2, 3], kind="BYTES"), "item"),
    "cut raw bytes": (ids("item", b"abc", [3], kind="INT64"), "item"),
    "cut texts": (ids("item", struct.pack("<I", 99) + b"ab", [1], kind="BYTES"), "item"),
    "cut length": (ids("item", b"\1", [1], kind="BYTES"), "item"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_tensor_is_named(plain: ServedVersion, name: str) -> None:
    wrong, field = MISTAKES[name]
    extra = [ids("city", [1, 2])] if name == "negative length" else []
    with pytest.raises(BadRequest) as found:
        plain.reader.read([*GOOD, *extra, wrong])
    check_sentence(found.value, field)


def check_sentence(error: CallError, field: str) -> None:
    assert field in error.sentence
    assert "\n" not in error.sentence
    assert len(error.sentence) < 300
    assert 400 <= error.status < 500


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([COUNTS, AGES], "price"),
        ([COUNTS, AGES, ids("price", [1.0, float("nan"), 2.0], kind="FP32")], "price"),
        ([COUNTS, ids("age", [1.0, 1e300], kind="FP64"), PRICES], "age"),
        ([COUNTS, AGES, ids("price", [1.0, 2.0], kind="FP32")], "price"),
        ([COUNTS, AGES, ids("price", ["a", "b", "c"], kind="BYTES")], "price"),
        ([ids("candidates", [-1, 4]), AGES, PRICES], "candidates"),
        ([ids("candidates", []), AGES, PRICES], "candidates"),
        ([ids("candidates", [1.0, 2.0], kind="FP32"), AGES, PRICES], "candidates"),
        ([AGES], "candidates"),
        ([], "candidates"),
    ],
)
def test_missing_and_wrong_inputs_are_named(plain: ServedVersion, tensors: list[CallTensor], field: str) -> None:
    with pytest.raises(BadRequest) as found:
        plain.reader.read(tensors)
    check_sentence(found.value, field)


def test_too_many_candidates_are_refused_before_anything_is_read(plain: ServedVersion) -> None:
    with pytest.raises(TooLarge, match="51 candidates, at most 50"):
        plain.reader.read([ids("candidates", [51])])


def test_plain_json_says_the_same(named: ServedVersion) -> None:
    body = {
        "instances": [
            {
                "user": {"age": 30, "seen": ["sku-1", "sku-2"], "city": 12},
                "candidates": [{"price": 1, "item": "sku-3"}],
            },
            {"user": {"age": 40}, "candidates": [{"price": 2.5, "item": None}, {"price": 3, "words": [7, "b"]}]},
        ]
    }
    batch, _ = named.reader.read(instance_tensors(json.loads(json.dumps(body)), named.signature))
    assert batch.counts_R.tolist() == [1, 2]
    assert lists_of(batch.user_ids["seen"]) == [[1, 2], []]
    assert lists_of(batch.user_ids["city"]) == [[2], []]
    assert lists_of(batch.candidate_ids["item"]) == [[3], [], []]
    assert [len(own) for own in lists_of(batch.candidate_ids["words"])] == [0, 0, 2]
    scores = named.model.score(batch)
    assert predictions(scores, [1, 2], ["label"]) == {"predictions": [scores[:1].tolist(), scores[1:].tolist()]}
    two = np.stack([scores, 1 - scores], axis=1)
    assert predictions(two, [1, 2], ["a", "b"])["predictions"][1] == {
        "a": scores[1:].tolist(),
        "b": (1 - scores[1:]).tolist(),
    }


def test_numbers_are_those_of_the_original_data(named: ServedVersion, plain: ServedVersion) -> None:
    """log.yaml's rules for `age` come first, then the transforms of the schema; null is a missing value."""
    body = {"instances": [{"user": {"age": age}, "candidates": [{"price": 500}]} for age in (0, 3, None)]}
    batch, _ = named.reader.read(instance_tensors(json.loads(json.dumps(body)), named.signature))
    expected = [[(np.log1p(age) - 1.0) / 2.0] for age in (0.0, 3.0)]
    np.testing.assert_array_equal(batch.dense_user_RF, np.array([*expected, [0.25]], np.float32))
    assert batch.dense_candidate_NF.tolist() == [[100.0]] * 3
    with pytest.raises(BadRequest, match="input 'age': value 2 is not a finite number"):
        plain.reader.read(instance_tensors(body, plain.signature))


def test_hashed_tables_take_any_value(named: ServedVersion) -> None:
    found, num_unknown = named.reader.finders["words"].find(["red", 17, np.int64(17)])
    assert found.tolist() == [hash_value("red", 20), hash_value(17, 20), hash_value(17, 20)]
    assert num_unknown == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "instances"),
        ({"instances": {}}, "instances"),
        ({"instances": [3]}, "instances[0]"),
        ({"instances": [{"user": {}, "candidates": [], "x": 1}]}, "instances[0]"),
        ({"instances": [{"user": [], "candidates": []}]}, "instances[0].user"),
        ({"instances": [{"user": {"age": 1}}]}, "instances[0].candidates"),
        ({"instances": [{"user": {"age": 1}, "candidates": [1]}]}, "instances[0].candidates[0]"),
        ({"instances": [{"user": {"age": "old"}, "candidates": []}]}, "instances[0].user.age"),
        ({"instances": [{"user": {"age": True}, "candidates": []}]}, "instances[0].user.age"),
        ({"instances": [{"user": {"age": 10**400}, "candidates": []}]}, "age"),
        ({"instances": [{"user": {"age": 1, "price": 2}, "candidates": []}]}, "instances[0].user.price"),
        ({"instances": [{"user": {"age": 1, "seen": [1.5]}, "candidates": []}]}, "instances[0].user.seen"),
        ({"instances": [{"user": {"age": 1, "city": 2**80}, "candidates": []}]}, "city"),
    ],
)
def test_wrong_json_is_named(named: ServedVersion, body: Any, field: str) -> None:
    with pytest.raises(BadRequest) as found:
        named.reader.read(instance_tensors(body, named.signature))
    check_sentence(found.value, field)


def test_loading_needs_an_exported_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="recmill export"):
        load_version(tmp_path, max_candidates=1)
