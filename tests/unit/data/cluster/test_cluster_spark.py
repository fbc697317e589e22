"""Spark and DuckDB give the same rows in the same order."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Dataset, InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.cluster.spark_engine import missing_for_spark
from recmill.data.dataset import read_table
from tests.raw_logs import random_log, write_log

REASON = missing_for_spark()
# One worker runs them all: starting a JVM twice on two cores costs more than it saves.
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"Spark cannot run here: {REASON}"),
    pytest.mark.xdist_group("spark"),
]


@pytest.fixture(scope="module")
def spark():
    """An active session, so that the tests start one JVM."""
    import os
    import sys

    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        # Compiling costs more than it saves on a few hundred rows.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.wholeStage": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


def test_both_engines_give_the_same_dataset(tmp_path: Path, spark) -> None:
    # Few times, so that many rows of a session have none of their own; files that disagree about types.
    table = random_log(900, num_sessions=80, max_time=50)
    raw = write_log(tmp_path / "raw [1]", table, num_files=2)
    narrow = pq.read_table(raw / "log-1.parquet")
    narrow = narrow.set_column(3, "age", narrow.column("age").cast("float64"))
    pq.write_table(narrow, raw / "log-1.parquet")
    options = {"eval_fraction": 0.2, "rows_per_group": 100, "rows_per_part": 400}
    for layout, drawn in (("session", "random"), ("time", "last"), ("deduplicated", "last")):
        options["eval_sessions"] = drawn
        here = cluster_sessions(raw, out=tmp_path / "here", layout=layout, **options)
        there = cluster_sessions(raw, out=tmp_path / "there", layout=layout, engine="spark", **options)
        assert here.num_sessions == there.num_sessions == 80
        assert len(there.parts) > 2
        for split in ("train", "test"):
            assert read_table(here, split=split).equals(read_table(there, split=split))
    assert Dataset.load(tmp_path / "there", verify=True).splits == ["train", "test"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "raw [1]", "there"]
    names = {path.name for path in (tmp_path / "there").iterdir()}
    assert names == {"dataset.json", "schema.json", *(part.file for part in there.parts)}


def test_executors_write_beside_a_remote_output(tmp_path: Path, spark) -> None:
    raw = write_log(tmp_path / "raw", random_log(300))
    url = f"local://{tmp_path}/remote"  # any URL counts as remote: the parts travel through fsspec
    dataset = cluster_sessions(raw, out=url, engine="spark", rows_per_group=50, rows_per_part=100)
    assert read_table(dataset).equals(read_table(cluster_sessions(raw, out=tmp_path / "here")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "raw", "remote"]


def test_spark_cannot_read_the_memory_of_this_process(tmp_path: Path) -> None:
    import fsspec

    raw = write_log(tmp_path / "raw", random_log(10))
    fsspec.filesystem("memory").put(str(raw), "/spark-test", recursive=True)
    with pytest.raises(InputError, match="use engine 'duckdb'"):
        cluster_sessions("memory://spark-test", out=tmp_path / "out", engine="spark")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]
