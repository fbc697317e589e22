"""How every source writes a raw log: `log-*.parquet` in time order with `schema.json` beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, is_remote, read_json, refuse_foreign_folder, write_folder
from recmill.data.schema import Schema

ROWS_PER_GROUP = 65_536
ROWS_PER_FILE = 16 * ROWS_PER_GROUP


class LogWriter:
    """Receives record batches in time order and cuts them into row groups and files."""

    def __init__(self, folder: Path, schema: Schema, *, rows_per_group: int) -> None:
        self.folder = folder
        self.schema = schema
        self.num_rows = 0
        self._num_positive = 0.0
        self.info: dict[str, Any] = {}
        self._arrow_schema = schema.arrow_schema()
        self._rows_per_group = rows_per_group
        self._groups_per_file = max(1, ROWS_PER_FILE // rows_per_group)
        self._num_groups = 0
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._file: pq.ParquetWriter | None = None
        # Encoding Parquet is half of the work and releases the GIL: a thread does it while the next samples are made.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        self._num_positive += float(pc.sum(batch["label"]).as_py() or 0.0)
        self._waiting.append(batch)
        self._num_waiting += batch.num_rows
        while self._num_waiting >= self._rows_per_group:
            self._write_group()

    @property
    def base_rate(self) -> float:
        return self._num_positive / self.num_rows

    def flush(self) -> None:
        while self._num_waiting:
            self._write_group()
        self._finish_pending()

    def close(self) -> None:
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_pending(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._waiting, schema=self._arrow_schema)
        group = table.slice(0, self._rows_per_group)
        rest = table.slice(self._rows_per_group)
        self._waiting, self._num_waiting = rest.to_batches(), rest.num_rows
        self.num_rows += group.num_rows
        self._finish_pending()
        self._pending = self._thread.submit(self._encode_group, group)

    def _encode_group(self, group: pa.Table) -> None:
        if self._file is None:
            self._file = self._open_file(self._num_groups // self._groups_per_file)
        self._file.write_table(group, row_group_size=self._rows_per_group)
        self._num_groups += 1
        if self._num_groups % self._groups_per_file == 0:
            self._file.close()
            self._file = None

    def _open_file(self, number: int) -> pq.ParquetWriter:
        # Ids in time order repeat too far apart for a dictionary to pay: bit-packed deltas are written twice as fast
        # (30 instead of 60 ns per id) and take 7% more space than a dictionary with zstd.
        id_leaves = {f"{feature.name}.list.element": "DELTA_BINARY_PACKED" for feature in self.schema.id_features}
        return pq.ParquetWriter(
            self.folder / f"log-{number:05d}.parquet",
            self._arrow_schema,
            compression="zstd",
            use_dictionary=False,
            column_encoding={**id_leaves, "session_id": "PLAIN", "timestamp": "DELTA_BINARY_PACKED"},
        )


@contextmanager
def write_log(out: str | Path, schema: Schema, *, rows_per_group: int = ROWS_PER_GROUP) -> Iterator[LogWriter]:
    """A writer whose log appears at `out` when the block ends without an error.

    `writer.info`, `num_samples` and `base_rate` are added to the schema's info.
    """
    refuse_foreign_log(out)
    with write_folder(out, manifest_name="schema.json") as folder:
        writer = LogWriter(folder, schema, rows_per_group=rows_per_group)
        try:
            yield writer
            writer.flush()
        finally:
            writer.close()
        if writer.num_rows == 0:
            raise InputError(f"{out}: not written: the log would hold no rows")
        info = {**schema.info, **writer.info, "num_samples": writer.num_rows, "base_rate": writer.base_rate}
        # Not Schema.save, which sorts keys: splits are listed oldest first.
        text = json.dumps(replace(schema, info=info).to_json(), indent=2, allow_nan=False)
        (folder / "schema.json").write_text(text + "\n", encoding="utf-8")


def refuse_foreign_log(out: str | Path) -> None:
    """Raise unless `out` is new, empty or holds only a log of ours: users' own folders have a schema.json too."""
    if is_remote(out):
        return
    folder = Path(out)
    refuse_foreign_folder(folder.absolute(), "schema.json")
    if not (folder / "schema.json").is_file():
        return
    foreign = [path.name for path in folder.iterdir() if path.name != "schema.json" and not path.match("log-*.parquet")]
    if foreign or "source" not in read_json(folder / "schema.json").get("info", {}):
        raise InputError(
            f"{out}: holds files not from recmill generate ({', '.join(sorted(foreign)[:3]) or 'schema.json'}); "
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
