"""Spark and DuckDB prepare the same log."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow.parquet as pq
import pytest

from recmill.data.cluster.spark_engine import missing_for_spark
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.schema import Schema
from tests.event_logs import Options, Shop
from tests.unit.data.cluster.test_cluster_spark import spark
from tests.unit.data.inspection.test_snapshots import samples_of, write_shop
from tests.unit.data.test_vocabulary import prepare as prepare_day

REASON = missing_for_spark()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"Spark cannot run here: {REASON}"),
    pytest.mark.xdist_group("spark"),
]
__all__ = ["spark"]


@pytest.mark.slow
def test_both_engines_extend_the_same_vocabulary_and_find_the_same(tmp_path, spark):
    """Rare rows, retired values and warnings, over several days."""
    rows = "{min_count: 2, rare_rows: 3, retire_after: 2d}"
    days = {1: ["a", "a", "b", "b", "c", "c", "d"], 4: ["c", "d", "d", "e", "e", "q"]}  # a and b are retired
    for engine in ("duckdb", "spark"):
        before = None
        for day, items in days.items():
            (tmp_path / engine).mkdir(exist_ok=True)
            prepare_day(tmp_path / engine, day, items, rows=rows, before=before, engine=engine)
            before = day
    for day in days:
        ours, theirs = (tmp_path / engine / f"day{day}" for engine in ("duckdb", "spark"))
        assert Schema.load(theirs) == Schema.load(ours)
        assert (theirs / "checks.json").read_text() == (ours / "checks.json").read_text()
        for file in sorted(path.relative_to(ours) for path in ours.rglob("*.parquet")):
            assert pq.read_table(theirs / file) == pq.read_table(ours / file), file
    assert json.loads((tmp_path / "duckdb/day4/checks.json").read_text())["num_warnings"] > 0


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (11, Options(negatives="popular", per_positive=2, gap_ms=0, splits={"test": 0.3}, min_count=2)),
        pytest.param(12, Options(negatives="impressions", by_request=True), marks=pytest.mark.slow),
    ],
)
def test_both_engines_prepare_the_same_log(tmp_path, spark, seed, options):
    path = Shop.random(seed, 150).write(tmp_path / "shop", options)
    with gzip.open(tmp_path / "shop/events.csv.gz", "wt") as file:  # text too: types are guessed by each engine
        rows = pq.read_table(tmp_path / "shop/events.parquet").to_pylist()
        rows = [{name: "" if value != value else value for name, value in row.items()} for row in rows]  # NaN
        csv.DictWriter(file, rows[0]).writeheader()
        csv.DictWriter(file, rows[0]).writerows(rows)
    path.write_text(path.read_text().replace("events.parquet", "events.csv.gz"))
    for engine in ("duckdb", "spark"):
        prepare_log(path, out=tmp_path / engine, engine=engine)
    assert Schema.load(tmp_path / "spark") == Schema.load(tmp_path / "duckdb")
    files = sorted(file.relative_to(tmp_path / "duckdb") for file in (tmp_path / "duckdb").rglob("*.parquet"))
    assert len(files) > 4
    for file in files:
        assert pq.read_table(tmp_path / "spark" / file) == pq.read_table(tmp_path / "duckdb" / file), file


@pytest.mark.slow
def test_spark_reads_delta_and_iceberg_tables_without_packages_of_its_own(tmp_path, spark):
    path = write_shop(tmp_path / "shop")
    path.write_text(path.read_text().replace("format: delta", "format: delta, version: 1"))
    for engine in ("duckdb", "spark"):
        prepare_log(path, out=tmp_path / engine, engine=engine)
    assert samples_of(tmp_path / "duckdb").num_rows == 400
    assert samples_of(tmp_path / "spark") == samples_of(tmp_path / "duckdb")
