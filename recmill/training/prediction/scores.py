"""The folder of scores: one Parquet file per part, each written whole or not at all, and a manifest at the end.

scores/job.json             what is being scored: a folder belongs to one model and one set of rows
scores/part-00000.parquet   session_id, timestamp, file and row of the data, score_<label> for every label
scores/scores.json          all parts are there
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import InputError, dump_record, hash_file, read_checked_json, write_text_atomically
from recmill.artifacts.records import read_record
from recmill.data.known_rows import NewReads
from recmill.training.prediction.rows import ScorePart

JOB, MANIFEST = "job.json", "scores.json"
IDENTITY = b"recmill.scores"
NEW_READS = b"recmill.new_reads"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What job.json says about the scores."""

    model: str
    data: str
    split: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """A part as scores.json lists it; older ones have no hash."""

    file: str
    bytes: int
    sha256: str | None


def read_job(folder: Path) -> JobRecord:
    loaded = read_checked_json(folder / JOB, kind="prediction")
    return read_record(JobRecord, loaded, where=str(folder / JOB))


def score_column(label: str) -> str:
    return f"score_{label}"


def write_part(
    folder: Path, part: ScorePart, keys: pa.Table, scores_NT: np.ndarray, *, job: Mapping[str, Any], reads: NewReads
) -> None:
    """Write the scores of a part under its name once they are complete on the disk."""
    table = keys
    for label, scores_N in zip(job["labels"], scores_NT.T, strict=True):
        table = table.append_column(score_column(label), pa.array(np.ascontiguousarray(scores_N, np.float32)))
    counted = json.dumps(reads.to_json()).encode()
    table = table.replace_schema_metadata({IDENTITY: job["identity"].encode(), NEW_READS: counted})
    temporary = folder / f".{part.file}.{os.getpid()}.tmp"
    try:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True, use_dictionary=["file"])
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, folder / part.file)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, parts: Sequence[ScorePart]) -> None:
    """Remove what a run that was killed has left of these parts; others may be writing theirs."""
    for part in parts:
        for leftover in folder.glob(f".{part.file}.*.tmp"):
            leftover.unlink(missing_ok=True)


def find_written(
    folder: Path, parts: Sequence[ScorePart], identity: str, *, verify: bool = False
) -> dict[int, pq.FileMetaData]:
    """The footers of the parts that are complete; with `verify`, those whose pages have their checksums."""
    found = {}
    for part in parts:
        with (
            suppress(OSError, pa.ArrowException),
            pq.ParquetFile(folder / part.file, page_checksum_verification=verify) as file,
        ):
            footer = file.metadata
            for _ in file.iter_batches() if verify else ():
                pass
            if footer.num_rows == part.num_rows and (footer.metadata or {}).get(IDENTITY) == identity.encode():
                found[part.number] = footer
    return found


def load_finished(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder, whose parts are as they were written."""
    manifest = read_checked_json(folder / MANIFEST, kind="scores")
    listed = manifest.get("parts")
    for entry in listed if isinstance(listed, list) else [None]:
        part = read_record(PartRecord, entry, where=str(folder / MANIFEST), key="parts")
        path = folder / part.file
        is_whole = path.is_file() and path.stat().st_size == part.bytes
        if not is_whole or part.sha256 not in (None, hash_file(path)):
            raise InputError(f"{path}: is missing or was changed; remove {folder / MANIFEST} to score it again")
    return manifest


def finish(folder: Path, parts: Sequence[ScorePart], job: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest, which says that every row was scored once."""
    footers = find_written(folder, parts, job["identity"])
    if missing := [part.file for part in parts if part.number not in footers]:
        raise InputError(f"{folder}: {missing[0]} is missing or was changed while others were written; run it again")
    reads = NewReads()
    for footer in footers.values():
        counted = json.loads((footer.metadata or {}).get(NEW_READS, b"{}"))
        reads.add({name: (own["reads"], own["new"]) for name, own in counted.items()})
    manifest = {
        "format_version": 1,
        "kind": "scores",
        **{name: job[name] for name in ("model", "data", "split", "identity", "labels")},
        "num_rows": sum(part.num_rows for part in parts),
        "columns": ["session_id", "timestamp", "file", "row", *map(score_column, job["labels"])],
        "parts": [
            {
                "file": part.file,
                "num_rows": part.num_rows,
                "bytes": (folder / part.file).stat().st_size,
                "sha256": hash_file(folder / part.file),
            }
            for part in parts
        ],
    }
    if reads.tables:
        manifest["new_reads"] = reads.to_json()
    write_text_atomically(folder / MANIFEST, dump_record(manifest))
    return read_checked_json(folder / MANIFEST, kind="scores")
