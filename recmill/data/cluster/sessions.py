"""Turns a raw log into a dataset: rows clustered by session (or in time order), divided into splits, in Parquet parts.

The query is written once, in Ibis (query.py). DuckDB runs it here, out of core, and Spark on a cluster:

    canonical_rows   one type per column; a plain id becomes a list of one
    with_split       a session belongs to the split of its first timestamp, or is held out at random
    SORT_KEYS        the order of the layout

For the deduplicated layout, a sample of sessions shows first which features repeat (storage/record_format.py). Both
engines pass sorted rows to the same writer (storage/writer.py), so they write the same rows in the same order.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from recmill.artifacts import Dataset, InputError, explain_write_errors, refuse_foreign_folder, write_folder
from recmill.data.cluster.duckdb_engine import DuckDBEngine
from recmill.data.cluster.query import (
    Boundary,
    ClusterPlan,
    sampled,
    session_starts,
    with_random_split,
    with_split,
)
from recmill.data.log import RawLog
from recmill.data.memory_plan import LeanArrow, MemoryPlan, loaded_libraries
from recmill.data.repeats import count_repeats, layout_for
from recmill.data.schema import Schema
from recmill.data.storage.options import SORT_KEYS, row_options, writer_options
from recmill.data.storage.record_format import choose_record_format
from recmill.data.storage.writer import SPLIT_COLUMN, PartFormat
from recmill.data.vocabulary import copy_vocabulary
from recmill.progress import Progress, no_progress

CLUSTER_LAYOUTS = ("auto", *SORT_KEYS)
ENGINES = ("duckdb", "spark")
EVAL_SESSIONS = ("last", "random")


class ClusterEngine(Protocol):
    """Runs Ibis expressions over the rows of a log."""

    rows: Any  # ibis table of the canonical rows

    def fetch_row(self, query: Any) -> tuple[Any, ...]:
        """The only row of `query`."""

    def fetch_table(self, query: Any, schema: pa.Schema) -> pa.Table:
        """All rows of `query`, with the columns and types of `schema`."""

    def write_parts(self, query: Any, *, split_names: Sequence[str], form: PartFormat) -> list[dict[str, Any]]:
        """Sort `query` by split and SORT_KEYS and write it. Returns the parts as the manifest lists them."""

    def close(self) -> None: ...


def cluster_sessions(
    raw: str | Path | RawLog,
    *,
    out: str | Path,
    layout: str = "session",
    engine: str = "duckdb",
    memory_limit_bytes: int = 2 * 10**9,
    rows_per_group: int | None = None,
    rows_per_part: int = 1_000_000,
    eval_fraction: float = 0.0,
    eval_sessions: str = "last",
    schema: Schema | str | Path | None = None,
    progress: Progress = no_progress,
) -> Dataset:
    """Write the log as a dataset in the given layout.

    The schema names the held-out splits. If it names none, `eval_fraction` of the sessions become "test": those that
    start last, or with `eval_sessions="random"` those drawn by their ids, the same ones in every layout.
    `rows_per_group` defaults to 8192, in the deduplicated layout to up to four times that, or to what the memory
    allows. Layout "auto" follows from how much lists repeat in a sample of sessions; the dataset says why.
    `memory_limit_bytes` bounds how much the DuckDB engine lets this process grow; rows that do not fit go to
    disk. A single session larger than the limit exceeds it, because it stays whole in one row group.
    """
    _check_choices(layout, engine, eval_fraction, eval_sessions)
    refuse_foreign_folder(out, Dataset.manifest_name)
    log = raw if isinstance(raw, RawLog) else RawLog.open(raw, schema)
    if SPLIT_COLUMN in log.schema.columns:
        raise InputError(f"{log.path}: {SPLIT_COLUMN!r} is a reserved name; rename that feature")

    loaded = loaded_libraries()  # reading the log loads more, which the limit must hold

    def plan_for(layout: str, folder: Path) -> ClusterPlan:
        memory = MemoryPlan.of(
            log,
            layout=layout,
            limit_bytes=memory_limit_bytes,
            rows_per_group=rows_per_group,
            rows_per_part=rows_per_part,
            loaded=loaded,
        )
        if engine == "duckdb":
            memory.check(memory_limit_bytes, layout=layout)
        if not 1 <= memory.rows_per_group <= rows_per_part:
            raise InputError(
                f"rows_per_group is {memory.rows_per_group}, expected at least 1 and at most rows_per_part "
                f"({rows_per_part})"
            )
        return ClusterPlan(
            log=log,
            folder=folder,
            out=str(out),
            layout=layout,
            rows_per_part=rows_per_part,
            memory_limit_bytes=memory_limit_bytes,
            memory=memory,
            progress=progress,
        )

    plan_for("session" if layout == "auto" else layout, Path())  # refuses wrong sizes before the log is read
    with LeanArrow():
        log.validate(progress=progress)
    with LeanArrow(), write_folder(out, manifest_name=Dataset.manifest_name) as folder, explain_write_errors(out):
        why = ""
        if layout == "auto":
            layout, why = choose_layout(plan_for("session", folder), engine)
        plan = plan_for(layout, folder)
        parts, found = _run(plan, engine, eval_fraction, eval_sessions)
        body = {
            **found,
            "layout": layout,
            "layout_why": why,
            "num_rows": sum(part["num_rows"] for part in parts),
            "parts": parts,
            "source": {"name": Path(log.path).name, "num_files": len(log.files), "bytes": log.num_bytes},
        }
        assert body["num_rows"] == log.num_rows, f"wrote {body['num_rows']} of {log.num_rows} rows"
        log.schema.save(folder)
        copy_vocabulary(log.path, folder)
        Dataset.of_json(body, inputs={"raw": log.content_hash}).seal(folder)
    return Dataset.load(out)


def _check_choices(layout: str, engine: str, eval_fraction: float, eval_sessions: str) -> None:
    if layout not in CLUSTER_LAYOUTS:
        raise InputError(f"layout is {layout!r}, expected one of {', '.join(CLUSTER_LAYOUTS)}")
    if engine not in ENGINES:
        raise InputError(f"engine is {engine!r}, expected one of {', '.join(ENGINES)}")
    if not 0 <= eval_fraction < 1:
        raise InputError(f"eval_fraction is {eval_fraction}, expected at least 0 and less than 1")
    if eval_sessions not in EVAL_SESSIONS:
        raise InputError(f"eval_sessions is {eval_sessions!r}, expected one of {', '.join(EVAL_SESSIONS)}")


def choose_layout(plan: ClusterPlan, engine_name: str) -> tuple[str, str]:
    """The layout that suits the log, judged by a sample of its sessions, and why."""
    with _opened(plan, engine_name) as engine:
        rows = sample_sessions(plan, engine)
    return layout_for(*count_repeats(rows, plan.log.schema))


@contextmanager
def _opened(plan: ClusterPlan, engine_name: str) -> Iterator[ClusterEngine]:
    """The engine; InputError when memory or disk space does not suffice for what it does."""
    plan.spill_folder.mkdir()
    try:
        with closing(_open_engine(plan, engine_name)) as engine:
            yield engine
    except Exception as error:  # DuckDB's, Java's, or OSError from inside an Arrow stream
        text = str(error)
        if "No space left" in text or "max_temp_directory_size" in text:
            raise InputError(f"{plan.out}: cannot be written: the disk is full") from error
        if "Out of Memory" in text:
            limit = f"{plan.memory_limit_bytes:,} bytes of memory"
            raise InputError(f"{limit} are too few for this log; raise --memory-limit") from error
        raise
    finally:
        shutil.rmtree(plan.spill_folder, ignore_errors=True)


def _run(
    plan: ClusterPlan, engine_name: str, eval_fraction: float, eval_sessions: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parts, and what else the manifest needs to say about them."""
    with _opened(plan, engine_name) as engine:
        if eval_sessions == "random" and eval_fraction and not plan.log.schema.splits:
            split_names, query = ["train", "test"], draw_test(engine, plan.log, eval_fraction)
        else:
            split_names, boundaries = find_splits(engine, plan.log, eval_fraction)
            query = with_split(engine.rows, boundaries) if boundaries else engine.rows
        form, found = choose_format(plan, engine)
        parts = engine.write_parts(query, split_names=split_names, form=form)
        found["num_sessions"] = sum(part["num_sessions"] for part in parts)
        if plan.layout == "time":  # a session may lie in several parts
            found["num_sessions"] = engine.fetch_row(engine.rows.aggregate(n=engine.rows.session_id.nunique()))[0]
    return parts, found


def sample_sessions(plan: ClusterPlan, engine: ClusterEngine) -> pa.Table:
    """About as many rows as memory allows, in whole sessions, sorted."""
    rows = _fetch(plan, engine, sampled(engine.rows, engine.rows.session_id, share=_share(plan)))
    if not rows.num_rows:  # a few long sessions, of which none was drawn
        rows = _fetch(plan, engine, engine.rows.limit(plan.memory.sample_rows))
    return rows


def _share(plan: ClusterPlan) -> float:
    return plan.memory.sample_rows / plan.log.num_rows


def _fetch(plan: ClusterPlan, engine: ClusterEngine, query: Any) -> pa.Table:
    """Rows of a sample by session and time; twice as many at most, since a single session may be longer."""
    rows = engine.fetch_table(query.limit(2 * plan.memory.sample_rows), plan.arrow_schema)
    return rows.sort_by([("session_id", "ascending"), ("timestamp", "ascending")]).combine_chunks()


def choose_format(plan: ClusterPlan, engine: ClusterEngine) -> tuple[PartFormat, dict[str, Any]]:
    """The format of the parts, and what a reader needs to find in the manifest."""
    if plan.layout == "time":
        return PartFormat(schema=plan.arrow_schema, options=writer_options(plan.arrow_schema, plan.layout)), {}
    rows = sample_sessions(plan, engine)
    if plan.layout == "session":
        return PartFormat(schema=plan.arrow_schema, options=row_options(rows, plan.layout)), {}
    form, encoding = choose_record_format(
        rows,
        plan.log.schema,
        num_rows=plan.log.num_rows,
        rows_per_group=plan.memory.rows_per_group,
        max_shared_ids=plan.memory.max_shared_ids,
        fetch_users=lambda user: _fetch(plan, engine, sampled(engine.rows, engine.rows[user][0], share=_share(plan))),
    )
    return form, {"encoding": encoding.to_json()}


def _open_engine(plan: ClusterPlan, name: str) -> ClusterEngine:
    if name == "spark":
        from recmill.data.cluster.spark_engine import SparkEngine

        return SparkEngine(plan)
    return DuckDBEngine(plan)


def find_splits(engine: ClusterEngine, log: RawLog, eval_fraction: float) -> tuple[list[str], list[Boundary]]:
    """Names of the splits, "train" first, and where each of the others begins."""
    starts = session_starts(engine.rows)
    if log.schema.splits:
        first_time = engine.fetch_row(engine.rows.aggregate(first=engine.rows.timestamp.min()))[0]
        names, times = list(log.schema.splits), list(log.schema.splits.values())
        if first_time >= times[0]:
            raise InputError(
                f"{log.path}: no session starts before {times[0]}, where split {names[0]!r} begins, so no rows are "
                f"left to train on; the first starts at {first_time} (splits in schema.json are in ms, as timestamp is)"
            )
        return ["train", *names], [(time, None) for time in times]
    if eval_fraction == 0:
        return ["train"], []
    num_sessions = int(engine.fetch_row(starts.count().as_table())[0])
    if num_sessions < 2:
        raise InputError(f"{log.path}: eval_fraction needs at least 2 sessions to divide, found {num_sessions}")
    num_test = min(max(1, round(eval_fraction * num_sessions)), num_sessions - 1)
    ordered = starts.order_by("start", "session_id").limit(1, offset=num_sessions - num_test)
    start, session = engine.fetch_row(ordered.select("start", "session_id"))
    return ["train", "test"], [(int(start), int(session))]


def draw_test(engine: ClusterEngine, log: RawLog, eval_fraction: float) -> Any:
    """The rows, with about `eval_fraction` of their sessions in the second split."""
    query = with_random_split(engine.rows, share=eval_fraction)
    split = query[SPLIT_COLUMN]
    if engine.fetch_row(query.aggregate(first=split.min(), last=split.max())) != (0, 1):
        raise InputError(
            f"{log.path}: eval_fraction {eval_fraction} of its sessions, drawn at random, are none or all of them; "
            "give a larger log or another fraction"
        )
    return query
