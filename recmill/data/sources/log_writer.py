"""How every source writes a raw log: `log-*.parquet` in time order with `schema.json` beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, is_remote, read_json, refuse_foreign_folder, write_folder
from recmill.data.log import CHECKS_FILE, VOCABULARY_FOLDER
from recmill.data.schema import Schema
from recmill.data.sources.lists import IntArray
from recmill.progress import Progress

ROWS_PER_GROUP = 65_536
GROUPS_PER_FILE = 16


def write_log(
    out: str | Path,
    schema: Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    info: Callable[[], Mapping[str, Any]] = dict,
    finish: Callable[[Schema, Path], Schema] = lambda schema, _: schema,
) -> str | Path:
    """Write batches that come in time order; returns `out`, where the log appears when all of them are written.

    `info()`, called at the end, `num_samples` and `base_rate` are added to the schema's info. `finish` may then change
    the schema and write more files to the folder.
    """
    refuse_foreign_log(out)
    num_rows, num_positive = 0, 0.0
    with write_folder(out, manifest_name="schema.json") as folder:
        groups = _one_ahead(_row_groups(batches, schema.arrow_schema()))
        for number in count():
            if (first := next(groups, None)) is None:
                break
            with _open_file(folder / f"log-{number:05d}.parquet", schema) as file:
                for group in chain([first], islice(groups, GROUPS_PER_FILE - 1)):
                    file.write_table(group, row_group_size=ROWS_PER_GROUP)
                    num_rows += group.num_rows
                    num_positive += float(pc.sum(group[schema.labels[0]]).as_py() or 0.0)
        if num_rows == 0:
            raise InputError(f"{out}: not written: the log would hold no rows")
        found = {**schema.info, **info(), "num_samples": num_rows, "base_rate": num_positive / num_rows}
        # Not Schema.save, which sorts keys: splits are listed oldest first.
        schema = finish(replace(schema, info=found), folder)
        text = json.dumps(schema.to_json(), indent=2, allow_nan=False)
        (folder / "schema.json").write_text(text + "\n", encoding="utf-8")
    return out


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        while sum(own.num_rows for own in waiting) >= ROWS_PER_GROUP:
            table = pa.Table.from_batches(waiting, schema=schema)
            yield table.slice(0, ROWS_PER_GROUP)
            waiting = table.slice(ROWS_PER_GROUP).to_batches()
    if any(own.num_rows for own in waiting):
        yield pa.Table.from_batches(waiting, schema=schema)


def _one_ahead(groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The row groups, each made in a thread while the one before is encoded: half of the work, without the GIL."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = thread.submit(next, groups, None)
        while (group := pending.result()) is not None:
            pending = thread.submit(next, groups, None)
            yield group


def _open_file(path: Path, schema: Schema) -> pq.ParquetWriter:
    # Ids in time order repeat too far apart for a dictionary to pay: bit-packed deltas are written twice as fast
    # (30 instead of 60 ns per id) and take 7% more space than a dictionary with zstd.
    id_leaves = {f"{feature.name}.list.element": "DELTA_BINARY_PACKED" for feature in schema.id_features}
    return pq.ParquetWriter(
        path,
        schema.arrow_schema(),
        compression="zstd",
        use_dictionary=False,
        write_page_checksum=True,
        column_encoding={**id_leaves, "session_id": "PLAIN", "timestamp": "DELTA_BINARY_PACKED"},
    )


def in_row_groups(rows: IntArray, progress: Progress) -> Iterator[IntArray]:
    """The rows of one row group after another, reported as they are asked for."""
    for begin in range(0, len(rows), ROWS_PER_GROUP):
        piece = rows[begin : begin + ROWS_PER_GROUP]
        yield piece
        progress("write samples", begin + len(piece), len(rows))


def refuse_foreign_log(out: str | Path) -> None:
    """Raise unless `out` is new, empty or holds only a log of ours: users' own folders have a schema.json too."""
    if is_remote(out):
        return
    folder = Path(out)
    refuse_foreign_folder(folder.absolute(), "schema.json")
    if not (folder / "schema.json").is_file():
        return
    ours = ("schema.json", CHECKS_FILE, VOCABULARY_FOLDER)
    foreign = [path.name for path in folder.iterdir() if path.name not in ours and not path.match("log-*.parquet")]
    if foreign or "source" not in read_json(folder / "schema.json").get("info", {}):
        raise InputError(
            f"{out}: holds files not from recmill ({', '.join(sorted(foreign)[:3]) or 'schema.json'}); "
            "give another --out or empty it first"
        )


def summarise_log(out: str | Path, *, seconds: float) -> dict[str, Any]:
    """What `generate` reports about a log that it wrote in `seconds`."""
    schema = Schema.load(out)
    num_rows = int(schema.info["num_samples"])
    files = [] if is_remote(out) else sorted(Path(out).glob("log-*.parquet"))
    return {
        "path": str(out),
        "num_rows": num_rows,
        "num_sessions": int(schema.info["num_sessions"]),
        "num_files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": seconds,
        "samples_per_s": num_rows / seconds,
        "info": dict(schema.info),
    }
