import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.ikjt.batch import decode_block
from recmill.data.ikjt.distinct import DistinctBlock, find_distinct, find_windows
from recmill.data.log import RawLog
from recmill.data.schema import Feature, Schema
from recmill.data.transforms import Transforms

MAX_ID = 2**63 - 1


def transform(ids: list[list[int]], *steps: dict) -> list[list[int]]:
    """The lists of one feature after the steps."""
    lengths = np.array([len(own) for own in ids], dtype=np.int32)
    values = np.array([number for own in ids for number in own], dtype=np.int64)
    schema = Schema(features=(Feature(name="a", kind="sparse", num_rows=10, dim=4, transforms=steps),))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    values, starts, lengths = Transforms(schema).lists("a", values, starts, lengths)
    return [values[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def transform_dense(numbers: list[float], *steps: dict) -> list[float]:
    schema = Schema(features=(Feature(name="x", kind="dense", transforms=steps),))
    return Transforms(schema).values("x", np.array(numbers, dtype=np.float32)).tolist()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"op": "clip", "min": 3, "max": 8}, [[3, 3, 8, 8], [], [3]]),
        ({"op": "clip", "max": 4}, [[-2, 3, 4, 4], [], [1]]),
        ({"op": "truncate", "n": 2}, [[8, 9], [], [1]]),
        ({"op": "first_x", "n": 3}, [[-2, 3, 8], [], [1]]),
        ({"op": "bucketise", "boundaries": [0, 3, 9]}, [[0, 2, 2, 3], [], [1]]),
        ({"op": "map_ids", "mapping": {"8": 0, "-2": 5}, "default": 7}, [[5, 7, 0, 7], [], [7]]),
        ({"op": "map_ids", "mapping": {}, "default": 7}, [[7, 7, 7, 7], [], [7]]),
    ],
)
def test_a_step_gives_what_it_says(step, expected):
    assert transform([[-2, 3, 8, 9], [], [1]], step) == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"op": "log"}, [-np.log(3), 0.0, np.log(10)]),
        ({"op": "normalise", "mean": 1, "std": 2}, [-1.5, -0.5, 4.0]),
        ({"op": "clip", "min": -0.5}, [-0.5, 0.0, 9.0]),
        ({"op": "bucketise", "boundaries": [-1.5, 9]}, [0.0, 1.0, 2.0]),
    ],
)
def test_a_dense_step_gives_what_it_says(step, expected):
    assert transform_dense([-2.0, 0.0, 9.0], step) == pytest.approx(expected, rel=1e-6)


def splitmix(number: int) -> int:
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 % 2**64
    number ^= number >> 27
    number = number * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


@given(ids=st.lists(st.integers(-MAX_ID, MAX_ID), max_size=20), num_rows=st.integers(1, 2**32), seed=st.integers(0, 9))
def test_hashing_is_splitmix64(ids, num_rows, seed):
    offset = 0x9E3779B97F4A7C15 * (seed + 1)
    expected = [(splitmix((number + offset) % 2**64) >> 32) * num_rows >> 32 for number in ids]
    assert transform([ids], {"op": "hash_to_range", "num_rows": num_rows, "seed": seed}) == [expected]


def test_hashing_fills_the_range_evenly():
    [hashed] = transform([list(range(100_000))], {"op": "hash_to_range", "num_rows": 10})
    counts = np.bincount(hashed, minlength=10)
    assert counts.shape == (10,)
    assert np.abs(counts - 10_000).max() < 500  # 5 standard deviations


def test_ngrams_tell_order_and_place_apart():
    step = {"op": "ngram", "n": 2, "num_rows": 2**32}
    [[ab, ba], [again], [], [other]] = transform([[1, 2, 1], [1, 2], [1], [2, 3]], step)
    assert again == ab
    assert len({ab, ba, other}) == 3
    assert transform([[1, 2, 1]], step | {"seed": 1}) != [[ab, ba]]


def test_an_ngram_of_one_is_a_hash():
    ids = [[5, 9], [], [MAX_ID]]
    hashed = transform(ids, {"op": "hash_to_range", "num_rows": 1000, "seed": 3})
    assert transform(ids, {"op": "ngram", "n": 1, "num_rows": 1000, "seed": 3}) == hashed


steps = st.lists(
    st.sampled_from(
        [
            {"op": "hash_to_range", "num_rows": 9, "seed": 1},
            {"op": "clip", "min": 1, "max": 7},
            {"op": "truncate", "n": 2},
            {"op": "truncate", "n": 1},
            {"op": "first_x", "n": 3},
            {"op": "bucketise", "boundaries": [2, 4, 5]},
            {"op": "ngram", "n": 2, "num_rows": 8},
            {"op": "ngram", "n": 3, "num_rows": 8},
            {"op": "map_ids", "mapping": {"3": 4, "1": 0}, "default": 2},
        ]
    ),
    min_size=1,
    max_size=4,
)
id_lists = st.lists(st.integers(-3, 6), max_size=5)


def expanded(block: DistinctBlock) -> dict[str, list[list[int]]]:
    lists = {}
    for group in block.groups:
        rows = range(len(block)) if group.inverse_R is None else group.inverse_R.tolist()
        for key, values, starts, lengths in group.features():
            lists[key] = [values[starts[row] : starts[row] + lengths[row]].tolist() for row in rows]
    return lists


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([[1, 2, 3], [2, 3, 4], []]), id_lists), min_size=1, max_size=12),
    steps_a=steps,
    steps_b=steps,
)
def test_transforming_distinct_lists_is_transforming_all(rows, steps_a, steps_b):
    schema = Schema(
        features=(
            Feature(name="x", kind="dense", transforms=({"op": "log"},)),
            Feature(name="a", kind="sparse", num_rows=10, dim=4, transforms=steps_a),
            Feature(name="b", kind="sequence", num_rows=10, dim=4, transforms=steps_b),
        )
    )
    table = pa.table(
        {
            "session_id": [0] * len(rows),
            "timestamp": [0] * len(rows),
            "label": [0.0] * len(rows),
            "x": [float(len(b)) for _, b in rows],
            "a": [a for a, _ in rows],
            "b": [b for _, b in rows],
        },
        schema=schema.arrow_schema(),
    )
    block = decode_block(table, schema, checks_ranges=False)
    transforms = Transforms(schema)
    every = transforms.apply(find_distinct(block, ["a", "b"], []))
    for groups in ([["a"], ["b"]], [["b", "a"]]):
        distinct = find_distinct(block, ["a", "b"], groups)
        for form in (distinct, find_windows(distinct, ["a", "b"])):
            once = transforms.apply(form)
            assert expanded(once) == expanded(every)
            assert once.dense_RF.tolist() == every.dense_RF.tolist()


def test_a_mapping_can_be_a_file(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps({"8": 1}))
    pq.write_table(pa.table({"id": [8], "mapped": [1]}), tmp_path / "map.parquet")
    for name in ("map.json", "map.parquet"):
        step = {"op": "map_ids", "file": str(tmp_path / name), "default": 0}
        assert transform([[8, 9]], step) == [[1, 0]]
    with pytest.raises(InputError, match=r"feature 'a': the mapping .*missing.json cannot be read"):
        transform([[8]], {"op": "map_ids", "file": str(tmp_path / "missing.json"), "default": 0})


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("sparse", "clip", "must be an object"),
        ("sparse", {"op": "shuffle"}, "unknown transform 'shuffle', expected one of hash_to_range"),
        ("sparse", {"op": "log"}, "'log' is for dense features only"),
        ("dense", {"op": "truncate", "n": 3}, "'truncate' is for ids only"),
        ("sparse", {"op": "truncate"}, "lacks 'n', expected a whole number of at least 1"),
        ("sparse", {"op": "truncate", "n": 0}, "n is 0, expected a whole number of at least 1"),
        ("sparse", {"op": "truncate", "n": 3, "m": 1}, "has no parameter 'm'"),
        ("sparse", {"op": "hash_to_range", "num_rows": True}, "num_rows is True"),
        ("sparse", {"op": "clip"}, "needs 'min', 'max' or both"),
        ("sparse", {"op": "clip", "min": 3, "max": 1}, "needs 'min', 'max' or both"),
        ("sparse", {"op": "clip", "max": 1.5}, "ids are whole numbers"),
        ("dense", {"op": "normalise", "mean": 1, "std": 0}, "std is 0, expected a number above 0"),
        ("dense", {"op": "bucketise", "boundaries": [2, 1]}, "expected a list of rising numbers"),
        ("sparse", {"op": "map_ids", "default": 1}, "needs either 'mapping' or 'file'"),
        ("sparse", {"op": "map_ids", "mapping": {"x": 1}, "default": 1}, "expected an object such as"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(kind, step, message):
    with pytest.raises(InputError, match="feature 'f'") as caught:
        Feature(name="f", kind=kind, num_rows=5, dim=4, transforms=(step,))
    assert message in str(caught.value)


def test_a_schema_keeps_its_transforms(tmp_path):
    step = {"op": "hash_to_range", "num_rows": 5, "seed": 1}
    Schema(features=(Feature(name="f", kind="sparse", num_rows=5, dim=4, transforms=(step,)),)).save(tmp_path)
    assert Schema.load(tmp_path).feature("f").transforms == (step,)
    Schema(features=(Feature(name="f", kind="sparse", num_rows=5, dim=4),)).save(tmp_path)
    assert "transforms" not in (tmp_path / "schema.json").read_text()


def test_a_log_may_hold_any_id_that_a_transform_brings_into_range(tmp_path: Path):
    table = pa.table({"session_id": [1], "timestamp": [1], "label": pa.array([0.0], pa.float32()), "f": [[-5, MAX_ID]]})
    pq.write_table(table, tmp_path / "log.parquet")
    plain = Feature(name="f", kind="sparse", num_rows=5, dim=4)
    with pytest.raises(InputError, match="is negative"):
        RawLog.open(tmp_path, Schema(features=(plain,))).validate()
    hashed = Feature(name="f", kind="sparse", num_rows=5, dim=4, transforms=({"op": "hash_to_range", "num_rows": 5},))
    RawLog.open(tmp_path, Schema(features=(hashed,))).validate()


@given(numbers=st.lists(st.sampled_from([0.0, -0.0, 1.5, -3.0]), max_size=30))
def test_dense_values_that_stay_are_transformed_as_all_are(numbers):
    steps = ({"op": "log"}, {"op": "normalise", "mean": 0.5, "std": 3})
    schema = Schema(features=(Feature(name="x", kind="dense", transforms=steps),))
    column = np.array(numbers, dtype=np.float32)
    block = DistinctBlock(dense_RF=column[:, None], label_RT=np.zeros_like(column)[:, None], groups=())
    changed = Transforms(schema).apply(block).dense_RF[:, 0]
    assert changed.tobytes() == np.array(transform_dense(numbers, *steps), dtype=np.float32).tobytes()
    assert block.dense_RF[:, 0].tobytes() == column.tobytes()
