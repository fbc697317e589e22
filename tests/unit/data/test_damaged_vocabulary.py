"""Damage to a vocabulary, or to a file that a log is prepared from, is one sentence that names the file."""

from __future__ import annotations

import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError, hash_file
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.vocabulary import Vocabulary, VocabularyMap
from tests.event_logs import BASE_MS
from tests.unit.data.preparation.test_mistakes import EVENTS, PRODUCTS, SPEC


@pytest.fixture
def shop(tmp_path):
    pq.write_table(pa.table(EVENTS), tmp_path / "events.parquet")
    pq.write_table(pa.table(PRODUCTS), tmp_path / "products.parquet")
    (tmp_path / "log.yaml").write_text(json.dumps(SPEC))
    prepare_log(tmp_path / "log.yaml", out=tmp_path / "day1")
    return tmp_path


@pytest.mark.parametrize("name", ["item.parquet", "brand.parquet", "vocabulary.json"])
def test_no_flipped_bit_of_a_vocabulary_goes_unnoticed(shop, name):
    file, draw = shop / "day1/vocabulary" / name, random.Random(3)
    before = file.read_bytes()
    for _ in range(20):
        place = draw.randrange(len(before))
        file.write_bytes(before[:place] + bytes([before[place] ^ 1 << draw.randrange(8)]) + before[place + 1 :])
        with pytest.raises(InputError, match=str(file)):
            prepare_log(shop / "log.yaml", out=shop / "day2", vocabulary=shop / "day1")
        with pytest.raises(InputError, match=str(file)):
            Vocabulary.load(shop / "day1", "brand" if "brand" in name else "item")
    assert not (shop / "day2").exists()


def rewrite(shop, change):
    """Change the file of a vocabulary as somebody would who also makes its hash fit."""
    file, map_file = shop / "day1/vocabulary/item.parquet", shop / "day1/vocabulary/vocabulary.json"
    pq.write_table(change(pq.read_table(file)), file)
    map_ = json.loads(map_file.read_text())
    del map_["checksum"]
    map_["tables"]["item"]["sha256"] = hash_file(file)
    map_file.write_text(json.dumps(map_))


@pytest.mark.parametrize("column", ["value", "row", "count", "since", "last_seen"])
def test_a_column_that_a_vocabulary_lacks_is_named(shop, column):
    rewrite(shop, lambda table: table.drop_columns(column))
    with pytest.raises(InputError, match=f"item.parquet: has no column '{column}'"):
        prepare_log(shop / "log.yaml", out=shop / "day2", vocabulary=shop / "day1")
    with pytest.raises(InputError, match=f"item.parquet: has no column '{column}'"):
        Vocabulary.load(shop / "day1", "item")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("row", lambda n: pa.array([10**9] * n), "column 'row' holds 1000000000, expected at least 0 and less than"),
        ("since", lambda n: pa.array(["x"] * n), "column 'since' must hold whole numbers"),
        ("last_seen", lambda n: pa.array([0.5] * n), "has no column 'last_seen' of whole numbers"),
        ("value", lambda n: pa.array([True] * n), "has no column 'value' of whole numbers or texts"),
    ],
)
def test_values_that_no_vocabulary_has_are_named(shop, column, values, message):
    def change(table):
        return table.set_column(table.schema.get_field_index(column), column, values(len(table)))

    rewrite(shop, change)
    with pytest.raises(InputError, match=f"item.parquet: {message}"):
        prepare_log(shop / "log.yaml", out=shop / "day2", vocabulary=shop / "day1")


def test_a_missing_vocabulary_is_named(shop):
    (shop / "day1/vocabulary/item.parquet").unlink()
    with pytest.raises(InputError, match=r"item\.parquet: no such file, though vocabulary\.json lists it"):
        Vocabulary.load(shop / "day1", "item")


def test_a_map_without_hashes_is_still_read(shop):
    file = shop / "day1/vocabulary/vocabulary.json"
    map_ = json.loads(file.read_text())
    del map_["checksum"]
    for table in map_["tables"].values():
        table.pop("sha256", None)
    file.write_text(json.dumps(map_))
    assert VocabularyMap.load(shop / "day1").tables["item"].sha256 is None
    prepare_log(shop / "log.yaml", out=shop / "day2", vocabulary=shop / "day1")


def test_a_damaged_file_of_the_data_is_named(tmp_path):
    """DuckDB's own errors name no file for most damages."""
    rows = 3_000
    events = {
        "user": [f"u{n % 60}" for n in range(rows)],
        "item": [n % 2 + 1 for n in range(rows)],
        "ts": [BASE_MS + n for n in range(rows)],
        "clicks": [n % 2 for n in range(rows)],
    }
    pq.write_table(pa.table(events), tmp_path / "whole.parquet", compression="zstd")
    pq.write_table(pa.table(PRODUCTS), tmp_path / "products.parquet")
    (tmp_path / "log.yaml").write_text(json.dumps(SPEC))
    column = pq.read_metadata(tmp_path / "whole.parquet").row_group(0).column(0)
    whole = (tmp_path / "whole.parquet").read_bytes()
    sentences = []
    for place in range(column.data_page_offset, column.data_page_offset + column.total_compressed_size, 7):
        (tmp_path / "events.parquet").write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        try:
            prepare_log(tmp_path / "log.yaml", out=tmp_path / "log")
        except InputError as error:
            sentences.append(str(error))
        else:
            shutil.rmtree(tmp_path / "log")
    assert sentences
    assert not [sentence for sentence in sentences if "events.parquet" not in sentence or "\n" in sentence]


def test_no_flipped_bit_of_a_page_with_a_checksum_goes_unnoticed(tmp_path):
    """DuckDB does not compare checksums: most bits of plain columns would only change the log."""
    pq.write_table(pa.table(EVENTS), tmp_path / "events.parquet", write_page_checksum=True, use_dictionary=False)
    pq.write_table(pa.table(PRODUCTS), tmp_path / "products.parquet")
    (tmp_path / "log.yaml").write_text(json.dumps(SPEC))
    file, draw = tmp_path / "events.parquet", random.Random(5)
    column = pq.read_metadata(file).row_group(0).column(0)
    whole = file.read_bytes()
    last = column.data_page_offset + column.total_compressed_size - 1
    for place in (last, *(draw.randrange(last - 8, last) for _ in range(3))):  # values, not the page's header
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"events\.parquet, row group 0: column '\w+' is damaged"):
            prepare_log(tmp_path / "log.yaml", out=tmp_path / "log")
    file.write_bytes(whole)
    prepare_log(tmp_path / "log.yaml", out=tmp_path / "log")
