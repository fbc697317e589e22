"""Spark and DuckDB prepare the same log."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from recmill.data.cluster.spark_engine import missing_for_spark
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary
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


@settings(
    max_examples=max(2, settings.default.max_examples // 50),  # 4 in `make test-all`: 52 shops
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    seed=st.integers(0, 10**6),
    options=st.builds(
        Options,
        gap_ms=st.sampled_from([0, 1, 5]),
        by_request=st.just(True),  # impressions need it
        only_views=st.booleans(),
        negatives=st.sampled_from(["popular", "none", "uniform", "in_session", "impressions"]),
        per_positive=st.integers(1, 2),
        min_count=st.integers(1, 3),
        splits=st.sampled_from([{"test": 0.3}, {}]),
    ),
    is_text=st.booleans(),
)
def test_both_engines_prepare_the_same_log(seed, options, is_text, tmp_path_factory, spark):
    """Thirteen random shops at a time: a run of Spark costs seconds, whatever it reads."""
    folder = tmp_path_factory.mktemp("shops")
    path = Shop.of_many(seed, 13, 70).write(folder / "shop", options)
    if is_text:  # types are guessed by each engine
        with gzip.open(folder / "shop/events.csv.gz", "wt") as file:
            rows = pq.read_table(folder / "shop/events.parquet").to_pylist()
            rows = [{name: "" if value != value else value for name, value in row.items()} for row in rows]  # NaN
            csv.DictWriter(file, rows[0]).writeheader()
            csv.DictWriter(file, rows[0]).writerows(rows)
        path.write_text(path.read_text().replace("events.parquet", "events.csv.gz"))
    for engine in ("duckdb", "spark"):
        prepare_log(path, out=folder / engine, engine=engine)
    assert Schema.load(folder / "spark") == Schema.load(folder / "duckdb")
    assert (folder / "spark/checks.json").read_text() == (folder / "duckdb/checks.json").read_text()
    files = sorted(file.relative_to(folder / "duckdb") for file in (folder / "duckdb").rglob("*.parquet"))
    assert len(files) > 4
    for file in files:
        assert pq.read_table(folder / "spark" / file) == pq.read_table(folder / "duckdb" / file), file


MESSY = """
format_version: 1
sources:
  events: {path: events.csv, delimiter: ";", decimal: ",", nulls: [N/A]}
  items: {path: items.json, key: item.sku}
events:
  source: events
  user: user
  item: sku
  time: {column: at}
  session: {gap: 30min}
joins: [{source: items, column: sku}]
labels: [{name: bought, where: [{column: bought, equals: 1}]}]
features:
- {name: user, column: user, kind: sparse, dim: 4}
- {name: item, column: sku, kind: sparse, dim: 4}
- {name: remark, column: remark, kind: sparse, dim: 4}
- {name: version, column: Remark_1, kind: sparse, dim: 4}
- {name: price, column: price, kind: dense}
- {name: tags, column: tags, separator: "|", kind: sparse, dim: 4}
- {name: topics, column: items.item.topics, kind: sequence, dim: 4}
- {name: colour, column: items.item.look.colour, kind: sparse, dim: 4}
- {name: seen, history: {of: sku, last: 5}, table: item}
splits: {test: 0.2}
"""


def test_both_engines_read_messy_text_alike(tmp_path, spark):
    """Decimal commas, nulls in words, quotes, line breaks, zeros in front, offsets, a name twice, records."""
    lines = ["user;sku;at;bought;price;remark;Remark;tags"]
    for n in range(120):
        at = f"2025-03-01T{n // 10:02}:{n % 10 * 6:02}:00" + ("", "Z", "+02:00", "-05:30")[n % 4]
        user, price = f'"u;{n % 7}"', ("N/A", f"{n % 9},5", "-2", ",25")[n % 4]
        remark = ('"a ""b"", c"', '"two\nlines"', '""', "N/A", "plain")[n % 5]
        fields = [user, f"{n % 11:04}", at, str(n % 3 % 2), price, remark, f"1.{n % 3}00", ("x| y", "", "y|x|z")[n % 3]]
        lines.append(";".join(fields))
    (tmp_path / "events.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    items = [
        {"item": {"sku": f"{n:04}", "topics": [n, 7][: n % 3], "look": {"colour": ["red", None][n % 2]}}, "made": "x"}
        for n in range(11)
    ]
    (tmp_path / "items.json").write_text(json.dumps(items, indent=1))
    (tmp_path / "log.yaml").write_text(MESSY)
    for engine in ("duckdb", "spark"):
        prepare_log(tmp_path / "log.yaml", out=tmp_path / engine, engine=engine)
    assert Schema.load(tmp_path / "spark") == Schema.load(tmp_path / "duckdb")
    assert samples_of(tmp_path / "spark") == samples_of(tmp_path / "duckdb")
    known = {name: Vocabulary.load(tmp_path / "spark", name) for name in ("item", "remark", "version", "tags")}
    assert known["item"].are_known(["0003", "3"]).tolist() == [True, False]
    assert (
        known["remark"].are_known(['a "b", c', "two\nlines", "plain", "N/A", ""]).tolist() == [True] * 3 + [False] * 2
    )
    assert known["version"].are_known(["1.100", "1.1"]).tolist() == [True, False]
    assert known["tags"].are_known(["x", "y", "z", " y"]).tolist() == [True, True, True, False]
    first = samples_of(tmp_path / "spark")["timestamp"][0].as_py()
    assert datetime.fromtimestamp(first / 1_000, UTC).isoformat() == "2025-02-28T22:12:00+00:00"  # 00:12+02:00


@pytest.mark.slow
def test_spark_reads_delta_and_iceberg_tables_without_packages_of_its_own(tmp_path, spark):
    path = write_shop(tmp_path / "shop")
    path.write_text(path.read_text().replace("format: delta", "format: delta, version: 1"))
    for engine in ("duckdb", "spark"):
        prepare_log(path, out=tmp_path / engine, engine=engine)
    assert samples_of(tmp_path / "duckdb").num_rows == 400
    assert samples_of(tmp_path / "spark") == samples_of(tmp_path / "duckdb")
