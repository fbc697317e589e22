import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources import log_writer
from recmill.data.sources.lists import id_column
from recmill.data.sources.log_writer import summarise_log, write_log

SCHEMA = Schema(
    features=(Feature(name="item", kind="sparse", num_rows=100, dim=4),),
    splits={"valid": 5, "test": 8},
    info={"source": "test", "num_sessions": 1},
)


def rows(first, last):
    count = last - first
    return pa.RecordBatch.from_arrays(
        [
            pa.array([7] * count, pa.int64()),
            pa.array(range(first, last), pa.int64()),
            pa.array([float(row % 2) for row in range(first, last)], pa.float32()),
            id_column(np.arange(first, last)),
        ],
        schema=SCHEMA.arrow_schema(),
    )


def test_batches_of_any_size_become_groups_and_files_of_one_size(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "ROWS_PER_GROUP", 4)
    monkeypatch.setattr(log_writer, "GROUPS_PER_FILE", 2)
    write_log(tmp_path / "log", SCHEMA, (rows(*ends) for ends in ((0, 1), (1, 10), (10, 10), (10, 21))))
    files = sorted((tmp_path / "log").glob("log-*.parquet"))
    metadata = [pq.ParquetFile(file).metadata for file in files]
    assert [[m.row_group(g).num_rows for g in range(m.num_row_groups)] for m in metadata] == [[4, 4], [4, 4], [4, 1]]
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table["timestamp"].to_pylist() == list(range(21))
    assert table["item"].to_pylist() == [[row] for row in range(21)]
    summary = summarise_log(tmp_path / "log", seconds=2.0)
    assert (summary["num_rows"], summary["num_files"], summary["samples_per_s"]) == (21, 3, 10.5)
    assert summary["info"]["base_rate"] == pytest.approx(10 / 21)


def test_splits_keep_their_order_on_disk(tmp_path):
    write_log(tmp_path / "log", SCHEMA, [rows(0, 10)])
    assert list(json.loads((tmp_path / "log" / "schema.json").read_text())["splits"]) == ["valid", "test"]
    assert Schema.load(tmp_path / "log").splits == {"valid": 5, "test": 8}


def test_nothing_is_left_when_the_source_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "ROWS_PER_GROUP", 2)

    def fail():
        yield rows(0, 10)
        raise InputError("line 3 is wrong")

    with pytest.raises(InputError, match="line 3"):
        write_log(tmp_path / "log", SCHEMA, fail())
    assert list(tmp_path.iterdir()) == []


def test_an_empty_log_is_not_written(tmp_path):
    for batches in ([], [rows(0, 0)]):
        with pytest.raises(InputError, match="no rows"):
            write_log(tmp_path / "log", SCHEMA, batches)
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_replaced_but_not_a_folder_of_the_user(tmp_path):
    for _ in range(2):
        write_log(tmp_path / "log", SCHEMA, [rows(0, 3)])
    mine = tmp_path / "mine"
    mine.mkdir()
    SCHEMA.save(mine)
    (mine / "clicks.parquet").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"not from recmill \(clicks.parquet\)"):
        write_log(mine, SCHEMA, [rows(0, 3)])
    assert (mine / "clicks.parquet").read_bytes() == b"precious"
