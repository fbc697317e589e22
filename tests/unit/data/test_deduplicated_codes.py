"""Popular ids are stored as short codes, where that pays, and read back as themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import load_encoding, read_table
from recmill.data.popular_ids import PopularIds, byte_entropy, dump_popular_ids, load_popular_ids
from recmill.data.schema import Feature, Schema
from tests.raw_logs import write_log

big = st.integers(0, 2**40)


@given(st.lists(big, min_size=1, unique=True), st.lists(big))
def test_codes_stand_for_their_ids(popular: list[int], others: list[int]) -> None:
    own = PopularIds(ids=np.array(popular))
    (loaded,) = load_popular_ids(dump_popular_ids({"items": own})).values()
    assert loaded.ids.tolist() == popular
    ids = np.array(popular + others, dtype=np.int64)
    codes = own.to_codes(ids)
    assert codes[: len(popular)].tolist() == list(range(len(popular)))
    assert loaded.to_ids(codes).tolist() == ids.tolist()


def test_bytes_that_are_always_the_same_cost_nothing() -> None:
    assert byte_entropy(np.array([7, 7, 7])) == 0
    assert byte_entropy(np.array([0, 1, 2, 3]) << 8) == 2


def zipf_ids(count: int, num_rows: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_rows + 1) ** -1.2
    return rng.permutation(num_rows)[rng.choice(num_rows, count, p=weights / weights.sum())]


def test_codes_are_chosen_where_ids_are_popular() -> None:
    skewed, uniform = zipf_ids(40_000, 50_000), np.random.default_rng(1).integers(0, 50_000, 40_000)
    found = PopularIds.choose(skewed, num_stored=400_000)
    assert found is not None
    assert byte_entropy(found.to_codes(skewed)) < 0.8 * byte_entropy(skewed)
    assert PopularIds.choose(uniform, num_stored=400_000) is None
    assert PopularIds.choose(skewed[:0], num_stored=0) is None


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
    last = pq.ParquetFile(tmp_path / "out" / dataset.parts[-1]["file"]).read_row_group(0)
    assert list(load_popular_ids(last.schema.metadata)) == ["items"]
