"""Popular ids are stored as short codes, where that pays, and read back as themselves."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import load_encoding, read_table
from recmill.data.schema import Feature, Schema
from recmill.data.storage.footer_text import TextKey, pack_bytes, pack_numbers, unpack_bytes, unpack_numbers
from recmill.data.storage.numbers import NumberCode, dump_code, load_code
from recmill.data.storage.popular_ids import PopularIds, byte_entropy, dump_popular_ids, load_popular_ids
from tests.raw_logs import write_log


@given(st.data(), st.sampled_from([1, 16, 17, 300, 5_000, 100_000, 2**40]), st.sampled_from([0, 1, 200, 256, 3_000]))
def test_symbols_stand_for_their_ids(data: st.DataObject, num_rows: int, num_popular: int) -> None:
    ranked = np.random.default_rng(num_popular).permutation(min(num_rows, 10_000))[:num_popular]
    own = PopularIds.of_ranked(ranked, num_rows)
    others = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=20))
    ids = np.concatenate([ranked[:300], others, ranked[-300:]]).astype(np.int64)
    used = np.zeros(len(own.ids), bool)
    symbols, rest = own.to_symbols(ids, used=used)
    loaded = load_popular_ids(dump_popular_ids("items", own, used), "items")
    assert loaded.to_ids(symbols, rest).tolist() == ids.tolist()
    assert (symbols[: min(len(ranked), own.num_direct, 300)] < own.num_direct).all()


def test_popular_ids_take_no_byte_beyond_their_symbol() -> None:
    own = PopularIds.of_ranked(np.arange(90_000, 90_000 + 2_048), 100_000)
    direct, block, other = (np.array([number]) for number in (90_000, 90_000 + own.num_direct, 7))
    assert [len(own.to_symbols(ids)[1]) for ids in (direct, block, other)] == [0, 1, 2]


def test_ids_that_a_part_does_not_use_are_not_in_its_footer() -> None:
    own = PopularIds.of_ranked(np.random.default_rng(0).permutation(100_000)[:4_096], 100_000)
    whole, some = np.ones(4_096, bool), np.zeros(4_096, bool)
    some[:100] = True
    sizes = [len(*dump_popular_ids("items", own, used).values()) for used in (whole, some)]
    assert sizes[1] < sizes[0] / 10


@given(st.binary(max_size=50), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
def test_footer_text_is_ascii_and_comes_back(data: bytes, numbers: list[int]) -> None:
    text = pack_bytes(np.frombuffer(data, np.uint8))
    assert text.isascii()
    assert unpack_bytes(text).tobytes() == data
    assert unpack_numbers(pack_numbers(np.array(numbers, np.int64))).tolist() == numbers


def test_footer_text_of_format_2_is_read() -> None:
    data = bytes(range(200))
    packed = base64.b64encode(pa.Codec("zstd").compress(data, asbytes=True))
    assert unpack_bytes(b"%d:%s" % (len(data), packed)).tobytes() == data


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.lists(st.integers(-(2**20), 2**20), max_size=300))
def test_numbers_come_back_whatever_the_code_was_made_for(numbers: list[int], known: list[int]) -> None:
    code = NumberCode.choose(np.array(known, np.int64))
    code = load_code(dump_code("gaps", code), "gaps")
    own = np.array([*numbers, *known[:50]], np.int64)
    assert code.to_numbers(*code.to_symbols(own)).tolist() == own.tolist()


def test_numbers_take_as_many_bytes_as_they_are_large() -> None:
    known = np.concatenate([np.full(500, 29_999), np.arange(0, 20_000, 20), np.arange(20_000, 9_000_000, 30_000)])
    code = NumberCode.choose(known)
    num_bytes = [len(code.to_symbols(np.array([number]))[1]) for number in (29_999, 1_000, 140_000, -(2**60))]
    assert num_bytes == [0, 1, 2, 8]


def test_bytes_that_are_always_the_same_cost_nothing() -> None:
    assert byte_entropy(np.array([7, 7, 7])) == 0
    assert byte_entropy(np.array([0, 1, 2, 3]) << 8) == 2


def zipf_ids(count: int, num_rows: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_rows + 1) ** -1.2
    return rng.permutation(num_rows)[rng.choice(num_rows, count, p=weights / weights.sum())]


def test_codes_are_chosen_where_ids_are_popular() -> None:
    skewed, uniform = zipf_ids(40_000, 50_000), np.random.default_rng(1).integers(0, 50_000, 40_000)
    found = PopularIds.choose(skewed, num_rows=50_000, num_stored=400_000)
    assert found is not None
    symbols, rest = found.to_symbols(skewed)
    assert byte_entropy(symbols) + 8 * len(rest) / len(skewed) < 0.75 * byte_entropy(skewed)
    assert PopularIds.choose(uniform, num_rows=50_000, num_stored=400_000) is None
    assert PopularIds.choose(skewed[:0], num_rows=50_000, num_stored=0) is None


def test_coded_datasets_read_back_whole_and_by_row_group(tmp_path: Path) -> None:
    schema = Schema(
        features=(
            Feature(name="item", kind="sparse", table="items", num_rows=50_000, dim=4),
            Feature(name="shop", kind="sparse", num_rows=50_000, dim=4),
        )
    )
    num_rows = 20_000
    log = pa.table(
        {
            "session_id": np.arange(num_rows) // 5,
            "timestamp": np.arange(num_rows),
            "label": np.zeros(num_rows, np.float32),
            "item": zipf_ids(num_rows, 50_000),
            "shop": np.random.default_rng(2).integers(0, 50_000, num_rows),
        }
    )
    raw = write_log(tmp_path / "raw", log, schema=schema)
    options = {"layout": "deduplicated", "rows_per_group": 4_000, "rows_per_part": 8_000}
    dataset = cluster_sessions(raw, out=tmp_path / "out", **options)
    assert {name: own.coded for name, own in load_encoding(dataset).features.items()} == {"item": True, "shop": False}
    assert len(dataset.parts) == 3
    assert read_table(dataset).column("item").to_pylist() == [[own] for own in log.column("item").to_pylist()]
    assert read_table(dataset, columns=["shop"]).column("shop").to_pylist() == [[n] for n in log["shop"].to_pylist()]
    last = pq.ParquetFile(tmp_path / "out" / dataset.parts[-1].file).read_row_group(0)
    assert len(load_popular_ids(last.schema.metadata, "items").ids) > 100


def test_texts_of_footers_are_the_same_key_only_if_they_are_equal() -> None:
    ends, middle = b"e" * 64, b"m" * 100
    key = TextKey(ends + middle + ends)
    assert key == TextKey(ends + middle + ends)
    assert hash(key) == hash(TextKey(ends + middle + ends))
    other = TextKey(ends + middle[:-1] + b"x" + ends)
    assert hash(other) == hash(key)
    assert other != key
    assert key != ends + middle + ends
