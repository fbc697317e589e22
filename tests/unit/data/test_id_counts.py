import numpy as np
import pyarrow as pa
import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.id_counts import NO_ID, count_ids, first_ids
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Feature, Schema
from tests.raw_logs import LOG_SCHEMA, random_log, write_log

LAYOUTS = ("time", "session", "deduplicated")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_of_wanted_ids_equal_those_of_the_rows(tmp_path, layout):
    raw = write_log(tmp_path / "raw", random_log(600))
    data = cluster_sessions(raw, out=tmp_path / "data", layout=layout, eval_fraction=0.2, rows_per_group=100)
    rows = read_table(data, split="train")
    items = [row[0] for row in rows["item"].to_pylist()]
    tags = [row[0] if row else NO_ID for row in rows["tags"].to_pylist()]
    wanted = {"item": np.array([0, 3, 7, 19]), "tags": np.array([NO_ID, 5])}
    shares = [count_ids(data, LOG_SCHEMA, wanted, rank=rank, world_size=2) for rank in range(2)]
    assert (shares[0]["item"] + shares[1]["item"]).tolist() == [items.count(i) for i in (0, 3, 7, 19)]
    assert (shares[0]["tags"] + shares[1]["tags"]).tolist() == [tags.count(i) for i in (NO_ID, 5)]


def test_ids_are_counted_after_their_transforms(tmp_path):
    halved = {"op": "map_ids", "mapping": {str(i): i // 2 for i in range(20)}, "default": 0}
    item = Feature(name="item", kind="sparse", num_rows=10, dim=4, transforms=(halved,))
    schema = Schema(features=(item,), item="item")
    table = pa.table(
        {"session_id": [1, 1, 2, 3], "timestamp": [0, 1, 2, 3], "label": [0.0, 1, 0, 1], "item": [4, 5, 6, 19]}
    )
    raw = write_log(tmp_path / "raw", table, schema=schema)
    data = cluster_sessions(raw, out=tmp_path / "data", layout="session", rows_per_group=2)
    assert count_ids(data, schema, {"item": np.arange(10)}, split="all")["item"].tolist() == [
        0,
        0,
        2,
        1,
        0,
        0,
        0,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("dedup", [None, [["tags"], ["item"]]])
def test_the_first_id_of_every_sample_is_found(tmp_path, dedup):
    raw = write_log(tmp_path / "raw", random_log(200))
    data = cluster_sessions(raw, out=tmp_path / "data", layout="session", rows_per_group=50)
    batch = next(iter(IngestPipeline(data, split="all", batch_size=200, shuffle=False, dedup=dedup)))
    plain = batch.ids.to_kjt() if dedup else batch.ids
    lists = plain.to_dict()["tags"].to_dense()
    assert first_ids(batch.ids, "tags").tolist() == [int(row[0]) if len(row) else NO_ID for row in lists]
