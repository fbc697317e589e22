"""Makes a raw log from event logs and side tables, as log.yaml says.

    log.yaml ── sources ── queries (Ibis: labels, outcomes, codes, vocabularies) ── samples (numpy) ── raw log

DuckDB runs this here, out of core; Spark on executors. Both pass whole users to the same function
(samples/blocks.py), so they write the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, dump_json, held_folder, is_remote
from recmill.data.checks.events import check_events
from recmill.data.checks.findings import LogFindings
from recmill.data.checks.samples import check_samples
from recmill.data.log import CHECKS_FILE
from recmill.data.memory_plan import LeanArrow
from recmill.data.preparation.engines.duckdb_engine import DuckDBQueries
from recmill.data.preparation.queries.recipe import make_recipe
from recmill.data.preparation.queries.tables import SourceTables
from recmill.data.preparation.reading import load_spec
from recmill.data.preparation.samples.summary import SessionStarts
from recmill.data.preparation.sources import SourceFiles, find_sources
from recmill.data.preparation.spec import LogSpec
from recmill.data.preparation.vocabulary import check_hashed, open_vocabularies, write_vocabularies
from recmill.data.schema import Schema
from recmill.data.sources.log_writer import refuse_foreign_log, write_log
from recmill.data.storage.checks import check_own_pages
from recmill.progress import Progress, no_progress

ENGINES = ("duckdb", "spark")
MIN_MEMORY_BYTES = 250_000_000


def prepare_log(
    log_yaml: str | Path,
    *,
    out: str | Path,
    engine: str = "duckdb",
    memory_limit_bytes: int = 2 * 10**9,
    vocabulary: str | Path | None = None,
    is_strict: bool = False,
    progress: Progress = no_progress,
) -> str | Path:
    """Write the raw log that `log_yaml` describes; returns `out`, where it appears when it is complete.

    `vocabulary` is a log prepared before: its values keep their rows, new values get rows after them (or of values
    that `retire_after` retires); what is new is in the schema's info.
    `memory_limit_bytes` bounds DuckDB and the samples that are made at a time; the rest goes to disk.
    What the checks of the data find is in checks.json and in the schema's info; `is_strict` refuses warnings.
    """
    if engine not in ENGINES:
        raise InputError(f"engine is {engine!r}, expected one of {', '.join(ENGINES)}")
    if memory_limit_bytes < MIN_MEMORY_BYTES:
        raise InputError(f"{memory_limit_bytes:,} bytes of memory are too few, expected at least {MIN_MEMORY_BYTES:,}")
    where = str(log_yaml)
    spec = load_spec(where)
    files = find_sources(spec, where)
    refuse_foreign_log(out)
    with LeanArrow(), _scratch(out) as scratch, _open_engine(engine, scratch, memory_limit_bytes, out) as queries:
        tables = open_tables(spec, where, files, queries)
        before, opened = open_vocabularies(vocabulary, queries) if vocabulary else (None, {})
        known = before.dense if before else {}
        recipe = make_recipe(tables, previous=opened, known=known, version=before.version + 1 if before else 1)
        if before:
            check_hashed(recipe, before, str(vocabulary))
        checked = check_events(tables, recipe.events)
        starts = SessionStarts()
        facts = {
            "source": "prepare",
            "num_events": recipe.events.num_events,
            "num_users": recipe.num_users,
            "num_items": recipe.plan.num_items,
            "columns": {f.name: f.history.of if f.history else f.column for f in spec.features if not f.time},
        }

        def finish(schema: Schema, folder: Path) -> Schema:
            known = write_vocabularies(recipe, schema, folder, queries, previous=before)
            schema = replace(schema, splits=starts.find_splits(spec.splits or {}, where))
            found = checked.with_more(check_samples(folder, schema))
            if is_strict:
                found.refuse_warnings(where)
            (folder / CHECKS_FILE).write_text(dump_json(found.to_json()), encoding="utf-8")
            return replace(schema, info={**schema.info, "checks": found.to_json(), "vocabulary": known.to_json()})

        rows = queries.make_rows(recipe, starts, progress)
        schema = replace(recipe.plan.schema, info=facts)
        return write_log(out, schema, rows, info=lambda: {"num_sessions": starts.num_sessions}, finish=finish)


def check_log(
    log_yaml: str | Path, *, memory_limit_bytes: int = 2 * 10**9, progress: Progress = no_progress
) -> LogFindings:
    """Check `log_yaml` against its data without preparing it: what would be an error raises, the rest is returned."""
    where = str(log_yaml)
    spec = load_spec(where)
    files = find_sources(spec, where)
    with (
        LeanArrow(),
        held_folder(purpose="check") as folder,
        closing(DuckDBQueries(folder, memory_limit_bytes=memory_limit_bytes)) as queries,
    ):
        progress("open the sources", 0, 0)
        tables = open_tables(spec, where, files, queries)
        progress("check the log", 0, 0)
        return check_events(tables, make_recipe(tables).events)


def open_tables(spec: LogSpec, log_yaml: str, files: Mapping[str, SourceFiles], queries: Any) -> SourceTables:
    opened = {name: queries.open(source) for name, source in files.items()}
    for source in files.values():
        for file in source.files if source.format == "parquet" else ():
            if not is_remote(file):
                check_own_pages(file)
    return SourceTables(spec=spec, log_yaml=log_yaml, files=files, tables=opened, engine=queries)


@contextmanager
def _scratch(out: str | Path) -> Iterator[Path]:
    """A temporary folder, beside a local output: on the disk that must hold the output anyway."""
    beside = None
    if not is_remote(out):
        beside = Path(out).absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    with held_folder(purpose="prepare", beside=beside) as folder:
        yield folder


@contextmanager
def _open_engine(engine: str, scratch: Path, memory_limit_bytes: int, out: str | Path) -> Iterator[Any]:
    if engine == "spark":
        from recmill.data.preparation.engines.spark_engine import SparkQueries

        queries: Any = SparkQueries(scratch, memory_limit_bytes=memory_limit_bytes, out=str(out))
    else:
        queries = DuckDBQueries(scratch, memory_limit_bytes=memory_limit_bytes)
    try:
        yield queries
    finally:
        queries.close()
