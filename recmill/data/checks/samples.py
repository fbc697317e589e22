"""Checks of the samples before the log appears: features that predict the label alone, histories, splits.

They read the Parquet files of the log with DuckDB, whichever engine wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq

from recmill.data.checks.findings import MAX_EXAMPLES, LogFinding, LogFindings
from recmill.data.checks.single_values import TELLING, auc_of_values, bins_of
from recmill.data.schema import Schema
from recmill.data.sources.log_writer import GROUPS_PER_FILE, ROWS_PER_GROUP

CHECKS = ("single features", "histories", "splits")
SAMPLE_ROWS = 2_000_000
HISTORY_ROWS = 262_144  # lists cost most: of 600,000 rows 0.06 instead of 0.24 s of CPU time
MANY_LATE = 0.05  # share of the sessions of a split that begin in the one before and end in it
MEMORY_LIMIT = "500MB"


@dataclass(frozen=True, kw_only=True)
class SampledLog:
    """A log whose samples are compared with their labels."""

    schema: Schema
    connection: Any
    rows: str  # DuckDB's expression for the sampled rows
    history_rows: str  # fewer of them
    every_row: str
    num_rows: int  # of the log

    def fetch(self, query: str) -> dict[str, Any]:
        found: dict[str, Any] = self.connection.execute(query).fetchnumpy()
        return found

    def examples(self, query: str) -> tuple[dict[str, Any], ...]:
        found = self.connection.execute(f"{query} LIMIT {MAX_EXAMPLES}")
        names = [column[0] for column in found.description]
        return tuple(dict(zip(names, row, strict=True)) for row in found.fetchall())

    def count(self, rows: str) -> int:
        """How many rows an expression holds; every row of the log is not counted again."""
        return self.num_rows if rows == self.every_row else int(self.fetch(f"SELECT count(*) AS n FROM {rows}")["n"][0])


def check_samples(folder: Path, schema: Schema) -> LogFindings:
    """Findings about the files in `folder`; of more than SAMPLE_ROWS rows, row groups spread over the log are read."""
    files = sorted(folder.glob("*.parquet"))
    with closing(
        duckdb.connect(config={"memory_limit": MEMORY_LIMIT, "temp_directory": str(folder / ".spill")})
    ) as con:
        con.execute("SET enable_progress_bar = false")
        log = SampledLog(
            schema=schema,
            connection=con,
            rows=_spread(files, SAMPLE_ROWS),
            history_rows=_spread(files, HISTORY_ROWS),
            every_row=_scan(files),
            num_rows=sum(pq.read_metadata(file).num_rows for file in files),
        )
        found = [*_sampling(log), *_single_features(log), *_histories(log), *_splits(log)]
    return LogFindings(checks=CHECKS, found=tuple(found))


def _scan(files: Sequence[Path]) -> str:
    listed = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
    return f"read_parquet([{listed}])"


def _spread(files: Sequence[Path], max_rows: int) -> str:
    """DuckDB's expression for at most about `max_rows` rows: some row groups of some files. It skips the others."""
    step = max(1, -(-sum(pq.read_metadata(file).num_rows for file in files) // max_rows))
    per_file = min(step, GROUPS_PER_FILE)
    scan = _scan(files[:: -(-step // per_file)])
    if per_file == 1:
        return scan  # with one step: every row
    numbered = scan.removesuffix(")") + ", file_row_number = true)"
    return f"(SELECT * FROM {numbered} WHERE file_row_number // {ROWS_PER_GROUP} % {per_file} = 0)"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sampling(log: SampledLog) -> Iterator[LogFinding]:
    """What was not looked at: a leak that only a few days have may hide there."""
    looked_at = {"single features": log.count(log.rows), "histories": log.count(log.history_rows)}
    if any(number < log.num_rows for number in looked_at.values()):
        listed = ", ".join(f"{number:,} for {name}" for name, number in looked_at.items())
        yield LogFinding(
            check="single features",
            level="info",
            subject="samples",
            message=f"of {log.num_rows:,} samples, looked at {listed}: row groups spread over the log",
            numbers={"num_samples": log.num_rows, **{f"num of {name}": n for name, n in looked_at.items()}},
        )


def _single_features(log: SampledLog) -> Iterator[LogFinding]:
    """Features that tell positives from negatives alone: they probably hold the label, or were filled after it."""
    label, half = _quoted(log.schema.labels[0]), "(hash(session_id) % 2)::INT"
    for feature in log.schema.features:
        if feature.kind == "sequence":
            continue
        value = _quoted(feature.name) + ("[1]" if feature.kind == "sparse" else "")
        groups = log.fetch(
            f"SELECT {value} AS v, {half} AS h, count(*)::DOUBLE AS n, sum(({label} > 0.5)::INT)::DOUBLE AS p "
            f"FROM {log.rows} WHERE {value} IS NOT NULL GROUP BY ALL ORDER BY ALL"
        )
        v, h, n, p = (np.asarray(groups[name]) for name in "vhnp")
        if not len(v):
            continue
        auc = auc_of_values(bins_of(v, n) if feature.kind == "dense" else v, h, n, p)
        if auc >= TELLING:
            yield LogFinding(
                check="single features",
                level="warning",
                subject=feature.name,
                message=f"feature {feature.name!r} predicts {log.schema.labels[0]!r} alone (AUC {auc:.3f}): is it "
                "known before the outcome?",
                numbers={"auc": auc},
                examples=log.examples(
                    f"SELECT {value} AS {_quoted(feature.name)}, count(*) AS samples, round(avg({label}), 4) AS rate "
                    f"FROM {log.rows} GROUP BY 1 ORDER BY 2 DESC, 1"
                ),
            )


def _histories(log: SampledLog) -> Iterator[LogFinding]:
    """Histories that hold the sample's own item: as the newest element for most positives, they hold the outcome."""
    schema, label = log.schema, _quoted(log.schema.labels[0])
    if not schema.item:
        return
    item = f"{_quoted(schema.item)}[1]"
    table = schema.feature(schema.item).table
    for feature in schema.features:
        if feature.kind != "sequence" or feature.table != table:
            continue
        history = _quoted(feature.name)
        # Row 0 stands for all unknown items.
        known = f"FROM {log.history_rows} WHERE {item} > 0"
        held, newest = f"list_contains({history}, {item})", f"coalesce({history}[-1] = {item}, false)"
        found = log.fetch(
            f"SELECT ({label} > 0.5)::INT AS y, avg({held}::INT) AS held, avg({newest}::INT) AS newest "
            f"{known} GROUP BY y ORDER BY y"
        )
        if list(found["y"]) != [0, 1]:
            continue
        (no, yes), (no_newest, yes_newest) = found["held"], found["newest"]
        auc = 0.5 + abs(float(yes) - float(no)) / 2
        is_own = float(yes_newest) > 0.5 > 10 * float(no_newest)
        yield LogFinding(
            check="histories",
            level="warning" if auc >= TELLING or is_own else "info",
            subject=feature.name,
            message=f"{feature.name!r} holds the sample's own item for {yes:.1%} of the positives and {no:.1%} of the "
            f"negatives, as its newest element for {yes_newest:.1%} and {no_newest:.1%}",
            numbers={"auc": auc, "positives": float(yes), "negatives": float(no)},
            examples=log.examples(
                f"SELECT session_id, timestamp, {label} AS label, {item} AS item, {history}[-3:] AS newest "
                f"{known} AND {newest} ORDER BY timestamp, session_id"
            ),
        )


def _splits(log: SampledLog) -> Iterator[LogFinding]:
    """Sessions that begin in one split and end in the next, and held-out samples that repeat trained ones."""
    sessions = f"(SELECT session_id, min(timestamp) AS a, max(timestamp) AS z FROM {log.every_row} GROUP BY 1)"
    for name, start in log.schema.splits.items():
        row = log.fetch(
            f"SELECT count(*) FILTER (a < {start} AND z >= {start}) AS late, count(*) FILTER (a >= {start}) AS own "
            f"FROM {sessions}"
        )
        late, own = int(row["late"][0]), int(row["own"][0])
        if late:
            yield LogFinding(
                check="splits",
                level="warning" if late > MANY_LATE * own else "info",
                subject=name,
                message=f"{late:,} sessions begin before split {name!r} and end in it; it has {own:,} of its own",
                numbers={"num_late": late, "num_sessions": own},
                examples=log.examples(f"SELECT * FROM {sessions} WHERE a < {start} AND z >= {start} ORDER BY a, 1"),
            )
    yield from _repeated(log)


def _repeated(log: SampledLog) -> Iterator[LogFinding]:
    """Held-out samples whose user, item and label were trained on; all samples of every user who is looked at."""
    schema = log.schema
    if not schema.splits or not schema.user or not schema.item:
        return
    start, one_in = min(schema.splits.values()), max(1, -(-log.num_rows // SAMPLE_ROWS))
    user, item = (f"{_quoted(name)}[1]" for name in (schema.user, schema.item))
    known = f"{user} > 0 AND {item} > 0" + (f" AND hash({user}) % {one_in} = 0" if one_in > 1 else "")
    pairs = (
        f"SELECT session_id, timestamp, {user} AS u, {item} AS i, {_quoted(schema.labels[0])} AS y "
        f"FROM {log.every_row} WHERE {known}"
    )
    trained = f"(SELECT DISTINCT u, i, y FROM ({pairs}) WHERE timestamp < {start})"
    held_out = f"(SELECT * FROM ({pairs}) WHERE timestamp >= {start})"
    repeated = f"{held_out} SEMI JOIN {trained} USING (u, i, y)"
    row = log.fetch(f"SELECT (SELECT count(*) FROM {held_out}) AS n, (SELECT count(*) FROM {repeated}) AS same")
    total, same = int(row["n"][0]), int(row["same"][0])
    if same:
        share = same / total
        whose = f" of one in {one_in} users" if one_in > 1 else ""
        yield LogFinding(
            check="splits",
            level="warning" if share > 0.5 else "info",
            subject=next(iter(schema.splits)),
            message=f"{share:.1%} of the held-out samples{whose} repeat user, item and label of a training sample",
            numbers={"num_repeated": same, "num_samples": total},
            examples=log.examples(
                f"SELECT session_id, timestamp, u AS {_quoted(schema.user)}, i AS {_quoted(schema.item)}, y AS label "
                f"FROM {repeated} ORDER BY timestamp, session_id"
            ),
        )
