"""Vocabularies of a log that is being prepared: written beside it, and those that they extend opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import InputError, dump_record, hash_file, join_path
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.preparation.queries.codes import PreviousTable
from recmill.data.preparation.queries.recipe import Recipe
from recmill.data.preparation.queries.tables import QueryEngine
from recmill.data.preparation.sources import SourceFiles
from recmill.data.schema import Schema
from recmill.data.sources.lists import numbers_of, plain_column
from recmill.data.vocabulary import MAP_FILE, TableMap, VocabularyMap, hash_map

COLUMNS = {"row": pa.int64(), "count": pa.int64(), "since": pa.int64(), "last_seen": pa.int64()}


def write_vocabularies(
    recipe: Recipe, schema: Schema, folder: Path, engine: QueryEngine, *, previous: VocabularyMap | None
) -> VocabularyMap:
    """Write every vocabulary below `folder`, and the map of all of them."""
    version = previous.version + 1 if previous else 1
    sizes = {table.name: table.num_rows for table in schema.tables}
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    tables, own_values = {}, {}
    for name, table in recipe.vocabularies.items():
        if isinstance(table, int):
            tables[name] = TableMap(num_rows=table, hashed=True)
            continue
        found = _ordered(engine.fetch(table.select("value", *COLUMNS)))
        path = folder / VOCABULARY_FOLDER / f"{name}.parquet"
        pq.write_table(found, path, compression="zstd")
        before = previous.tables.get(name) if previous else None
        own = _describe(found, version, before, num_rows=sizes[name], rare_rows=recipe.rare_rows[name])
        tables[name] = replace(own, sha256=hash_file(path))
        own_values[name] = found.slice(0, tables[name].num_values)  # rare values are the last
    fixed = {name: (own.num_rows if own.hashed else 0, own.rare_rows) for name, own in tables.items()}
    ancestors = (*previous.ancestors, previous.hash) if previous else ()
    dense = {feature.name: feature.dense for feature in recipe.plan.features if feature.kind == "dense"}
    own_hash = hash_map(own_values, fixed)
    made = VocabularyMap(version=version, hash=own_hash, ancestors=ancestors, tables=tables, dense=dense)
    (folder / VOCABULARY_FOLDER / MAP_FILE).write_text(dump_record(made.to_json()), encoding="utf-8")
    return made


def _ordered(found: pa.Table) -> pa.Table:
    """Rows in their order, then rare values, with the same types from every engine."""
    kind = pa.int64() if pa.types.is_integer(found.schema.field("value").type) else pa.string()
    found = found.cast(pa.schema({"value": kind, **COLUMNS}))
    is_rare = plain_column((numbers_of(found["row"]) == 0).view("int8"))
    ordered = found.append_column("is_rare", is_rare).sort_by(
        [("is_rare", "ascending"), ("row", "ascending"), ("count", "descending"), ("value", "ascending")]
    )
    return ordered.drop_columns("is_rare")


def _describe(found: pa.Table, version: int, before: TableMap | None, *, num_rows: int, rare_rows: int) -> TableMap:
    row, count, since = (numbers_of(found[name]) for name in ("row", "count", "since"))
    reads, is_own = max(1, int(count.sum())), row > 0
    is_new = is_own & (since == version)
    num_reused = int((is_new & (row < before.num_rows)).sum()) if before else 0
    num_kept = int((is_own & ~is_new).sum())
    return TableMap(
        num_rows=num_rows,
        rare_rows=rare_rows,
        num_values=int(is_own.sum()),
        num_rare=int((~is_own).sum()),
        rare_share=float(count[~is_own].sum() / reads),
        num_new=int(is_new.sum()),
        new_share=float(count[is_new].sum() / reads),
        num_reused=num_reused,
        num_retired=before.num_values - num_kept if before else 0,
    )


def open_vocabularies(log: str | Path, engine: QueryEngine) -> tuple[VocabularyMap, dict[str, PreviousTable]]:
    """The map of a log that was prepared before, and its vocabularies by table."""
    known = VocabularyMap.load(log)
    found = {}
    for name, own in known.tables.items():
        if not own.hashed:
            path = join_path(log, f"{VOCABULARY_FOLDER}/{name}.parquet")
            own.check_file(path)
            source = SourceFiles(name=path, format="parquet", path=path, files=(path,))
            found[name] = PreviousTable(
                path=path, table=engine.open(source), num_rows=own.num_rows, rare_rows=own.rare_rows
            )
    return known, found


def check_hashed(recipe: Recipe, previous: VocabularyMap, log: str | Path) -> None:
    """Raise if a table is hashed to another number of rows than in the log before, or no longer the same way."""
    for name, table in recipe.vocabularies.items():
        before = previous.tables.get(name)
        now = table if isinstance(table, int) else 0
        if before and (before.num_rows if before.hashed else 0) != now:
            was, is_now = (f"hash: {n}" if n else "a vocabulary" for n in (before.num_rows * before.hashed, now))
            raise InputError(f"{log}: table {name!r} has {was}, but log.yaml says {is_now}: rows would change meaning")


def describe_new(known: VocabularyMap) -> list[str]:
    """What is new since the version before, per table, in words."""
    if known.version == 1:
        return []
    lines = [f"  vocabulary version {known.version}; unknown to models trained before:"]
    for name, own in known.tables.items():
        if not own.hashed:
            text = f"    {name}: {own.num_new:,} new values ({own.new_share:.1%} of reads), {own.num_rows:,} rows"
            if own.num_retired:
                text += f"; {own.num_retired:,} values retired, {own.num_reused:,} rows reused"
            lines.append(text)
    return lines


def count_values(log: str | Path) -> dict[str, int]:
    """How many values the vocabulary of each table knows, in a log that was prepared."""
    filesystem, root = fsspec.core.url_to_fs(join_path(log, VOCABULARY_FOLDER))
    return {
        path.rpartition("/")[2].removesuffix(".parquet"): pq.read_metadata(path, filesystem=filesystem).num_rows
        for path in sorted(filesystem.glob(join_path(root, "*.parquet")))
    }
