"""The log that benchmarks/prepare.py prepares, and the same work in plain DuckDB SQL and in pandas."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LAST = 50
EVENTS_PER_USER, EVENTS_PER_ITEM = 150, 100
LOG_YAML = f"""
format_version: 1
sources:
  events: {{path: events.parquet}}
  products: {{path: products.parquet, key: product}}
  customers: {{path: customers.parquet, key: customer}}
events: {{source: events, user: customer, item: product, time: {{column: ts, unit: ms}}, session: {{gap: 30min}}}}
joins:
  - {{source: products, column: product}}
  - {{source: customers, column: customer}}
negatives: {{kind: popular}}
features:
  - {{name: customer, column: customer, kind: sparse}}
  - {{name: country, column: customers.country, kind: sparse}}
  - {{name: age, column: customers.age, kind: dense, transform: [standardise]}}
  - {{name: product, column: product, kind: sparse}}
  - {{name: brand, column: products.brand, kind: sparse}}
  - {{name: price, column: products.price, kind: dense, transform: [log1p, standardise]}}
  - {{name: history, history: {{of: product, last: {LAST}}}, table: product}}
"""


def write_shop(folder: Path, num_events: int, *, seed: int) -> None:
    """Events in time order with text and whole-number ids, and two side tables."""
    draw = np.random.default_rng(seed)
    users, items = max(num_events // EVENTS_PER_USER, 10), max(num_events // EVENTS_PER_ITEM, 10)

    def text(prefix: str, numbers: np.ndarray) -> pa.Array:
        return pa.array(np.char.add(prefix, numbers.astype(str)))

    events = {
        "customer": text("c", (users * draw.random(num_events) ** 1.5).astype(np.int64)),
        "product": (items * draw.random(num_events) ** 3).astype(np.int64),
        "ts": np.sort(draw.integers(0, 30 * 86_400_000, num_events)) + 1_700_000_000_000,
    }
    products = {
        "product": np.arange(items),
        "brand": text("b", draw.integers(0, 500, items)),
        "price": draw.random(items),
    }
    ages = draw.integers(18, 90, users)
    customers = {
        "customer": text("c", np.arange(users)),
        "country": text("l", draw.integers(0, 50, users)),
        "age": ages,
    }
    for name, table in {"events": events, "products": products, "customers": customers}.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet", compression="zstd")
    (folder / "log.yaml").write_text(LOG_YAML, encoding="utf-8")


def measure(side: str, folder: str, out: str, memory_limit_bytes: int) -> dict[str, Any]:
    """Seconds, rows and peak memory of one side; meant for a process of its own."""
    started = time.perf_counter(), time.process_time()
    num_rows = {"ours": prepare_ours, "duckdb": prepare_with_sql, "pandas": prepare_with_pandas}[side](
        Path(folder), Path(out), memory_limit_bytes
    )
    seconds, cpu_seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "rows": num_rows, "peak_bytes": peak_memory_bytes()}


def peak_memory_bytes() -> int:
    """The most memory that this program has held. Not ru_maxrss: Linux hands that of the parent over fork and exec."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def prepare_ours(folder: Path, out: Path, memory_limit_bytes: int) -> int:
    from recmill.data.preparation.prepared_log import prepare_log
    from recmill.data.schema import Schema

    prepare_log(folder / "log.yaml", out=out, memory_limit_bytes=memory_limit_bytes)
    return int(Schema.load(out).info["num_samples"])


SQL = """
CREATE TEMP TABLE items AS
  SELECT product, row_number() OVER (ORDER BY count(*) DESC, product) AS item_row
  FROM read_parquet('{folder}/events.parquet') GROUP BY product;
CREATE TEMP TABLE users AS
  SELECT customer, row_number() OVER (ORDER BY count(*) DESC, customer) AS user_row
  FROM read_parquet('{folder}/events.parquet') GROUP BY customer;
CREATE TEMP TABLE coded AS
  SELECT user_row, item_row, ts, row_number() OVER () - 1 AS number
  FROM read_parquet('{folder}/events.parquet') JOIN items USING (product) JOIN users USING (customer);
CREATE TEMP TABLE side_items AS
  SELECT item_row, dense_rank() OVER (ORDER BY brand) AS brand_row, ln(1 + price) AS price
  FROM read_parquet('{folder}/products.parquet') JOIN items USING (product);
CREATE TEMP TABLE side_users AS
  SELECT user_row, dense_rank() OVER (ORDER BY country) AS country_row, age
  FROM read_parquet('{folder}/customers.parquet') JOIN users USING (customer);
CREATE TEMP TABLE listed AS
  SELECT *, list(item_row) OVER past AS history,
    sum(is_start) OVER (PARTITION BY user_row ORDER BY ts ROWS UNBOUNDED PRECEDING) AS session
  FROM (
    SELECT *, (ts - coalesce(lag(ts) OVER (PARTITION BY user_row ORDER BY ts), 0) > 1800000)::INT AS is_start FROM coded
  )
  WINDOW past AS (PARTITION BY user_row ORDER BY ts ROWS BETWEEN {last} PRECEDING AND 1 PRECEDING);
CREATE TEMP TABLE drawn AS
  SELECT l.number, d.item_row FROM listed l JOIN coded d ON d.number = hash(l.number) % {num_events}
  WHERE NOT EXISTS (SELECT 1 FROM coded p WHERE p.user_row = l.user_row AND p.item_row = d.item_row);
COPY (
  SELECT user_row * 16777216 + session AS session_id, ts + moved AS timestamp, label::FLOAT AS label,
    [user_row] AS customer, [country_row] AS country, age::FLOAT AS age, [item_row] AS product, [brand_row] AS brand,
    price::FLOAT AS price, history
  FROM (
    SELECT user_row, session, ts, 0 AS moved, 1 AS label, item_row, history FROM listed
    UNION ALL
    SELECT user_row, session, ts, 1, 0, drawn.item_row, history FROM listed JOIN drawn USING (number)
  ) JOIN side_users USING (user_row) JOIN side_items USING (item_row)
  ORDER BY timestamp, session_id
) TO '{out}/log.parquet' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 65536);
"""


def prepare_with_sql(folder: Path, out: Path, memory_limit_bytes: int) -> int:
    """One statement per table, with the memory that DuckDB takes by default."""
    import duckdb

    out.mkdir(parents=True)
    num_events = pq.ParquetFile(folder / "events.parquet").metadata.num_rows
    connection = duckdb.connect()
    connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}; SET temp_directory = '{out}/spill'")
    connection.execute(SQL.format(folder=folder, out=out, last=LAST, num_events=num_events))
    return pq.ParquetFile(out / "log.parquet").metadata.num_rows


def prepare_with_pandas(folder: Path, out: Path, memory_limit_bytes: int) -> int:
    """Vectorised pandas; histories are slices of one array per user, as lists."""
    import pandas as pd

    out.mkdir(parents=True)
    events = pd.read_parquet(folder / "events.parquet")
    for column in ("customer", "product"):
        counts = events[column].value_counts()
        events[f"{column}_row"] = events[column].map(pd.Series(np.arange(1, len(counts) + 1), index=counts.index))
    events = events.sort_values(["customer_row", "ts"], kind="stable").reset_index(drop=True)
    is_first = events.customer_row != events.customer_row.shift()
    events["session_id"] = (is_first | (events.ts.diff() > 1_800_000)).cumsum()
    rows, firsts = events.product_row.to_numpy(), np.maximum.accumulate(np.where(is_first, np.arange(len(events)), 0))
    events["history"] = [rows[max(first, end - LAST) : end] for end, first in enumerate(firsts)]
    drawn = events.assign(
        product=events["product"].sample(frac=1.0, random_state=0).to_numpy(), label=0.0, ts=events.ts + 1
    )
    taken = pd.MultiIndex.from_frame(events[["customer_row", "product"]])
    drawn = drawn[~pd.MultiIndex.from_frame(drawn[["customer_row", "product"]]).isin(taken)]
    drawn["product_row"] = drawn["product"].map(events.drop_duplicates("product").set_index("product").product_row)
    samples = pd.concat([events.assign(label=1.0), drawn], ignore_index=True)
    samples = samples.merge(pd.read_parquet(folder / "products.parquet"), on="product")
    samples = samples.merge(pd.read_parquet(folder / "customers.parquet"), on="customer")
    for column in ("brand", "country"):
        samples[column] = samples[column].astype("category").cat.codes
    samples["price"], samples["age"] = np.log1p(samples.price), (samples.age - samples.age.mean()) / samples.age.std()
    samples = samples.sort_values(["ts", "session_id"]).drop(columns=["customer", "product"])
    samples.to_parquet(out / "log.parquet", compression="zstd", row_group_size=65_536)
    return len(samples)
