"""What each codec of the deduplicated layout gains: bytes on disk, and time to write and to read, with and without it.

    popular ids       ids as one-byte symbols and what follows them     without: ids as 64-bit numbers
    sequence store    sessions of a user share one history              without: one history per session
    page decoder      our kernel decodes the pages of a row group       without: Arrow decodes them

Every codec is compared with all others in place. Each side chooses the best Parquet encodings of its columns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from harness import Metric, Options, compare, compare_counts, finish, in_turns, parse_options, say, warn_if_busy
from session_logs import why_no_globo

from kernels.decode_pages import GroupDecoder
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.schema import Schema
from recmill.data.sources import make_raw_log
from recmill.data.storage.deduplicated import decode_distinct
from recmill.data.storage.encoding import Encoding, choose_encoding
from recmill.data.storage.record_format import (
    choose_popular_ids,
    find_user,
    first_sessions,
    record_format,
    share_histories,
)
from recmill.data.storage.writer import PartWriter, cut_row_groups

ROWS_PER_GROUP = 32_768
SAMPLE_ROWS = 32_768  # as many as clustering looks at
RECD_SESSIONS = {"full": 12_000, "quick": 4_000, "tiny": 300}
GLOBO_ONE_IN = {"full": 10, "quick": 40, "tiny": 2_000}
REPEATS = {"full": 5, "quick": 3, "tiny": 1}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A log as it was written: one file, and what its reader must know."""

    path: Path
    encoding: Encoding
    schema: Schema
    num_rows: int
    num_bytes: int
    write_s: float

    def read(self, *, kernel: str | None = None) -> float:
        """Seconds to decode every row group from memory to distinct lists."""
        data, metadata = pa.py_buffer(self.path.read_bytes()), pq.read_metadata(self.path)
        started = time.perf_counter()
        decoder = GroupDecoder(metadata, range(metadata.num_columns), kernel=kernel)
        for index in range(metadata.num_row_groups):
            decode_distinct(decoder.decode(data, 0, index), self.schema, self.encoding)
        return time.perf_counter() - started


def write(rows: pa.Table, schema: Schema, path: Path, *, popular_ids: bool = True, sequences: bool = True) -> Stored:
    """Write the rows, whole sessions in order, as one part."""
    path.mkdir()
    sample = first_sessions(rows, SAMPLE_ROWS)
    encoding = choose_encoding(sample, schema)
    if sequences and (key := find_user(sample, schema, encoding)):
        encoding = share_histories(sessions_of_users(rows, key), schema, encoding, key)
    popular = {}
    if popular_ids:
        popular = choose_popular_ids(sample, schema, encoding, scale=rows.num_rows / sample.num_rows)
    coded = {name for table in schema.tables if table.name in popular for name in table.features}
    features = {name: replace(own, coded=name in coded) for name, own in encoding.features.items()}
    encoding = Encoding(features=features)
    group = first_sessions(sample, ROWS_PER_GROUP)
    form = record_format(group, schema, encoding, popular, max_shared_ids=rows.num_rows * 1_000)
    started = time.perf_counter()
    writer = PartWriter(
        folder=str(path), prefix="part", form=form, split_names=["train"], rows_per_part=rows.num_rows + 1
    )
    groups = cut_row_groups(
        rows.to_batches(), schema=schema.arrow_schema(), layout="deduplicated", rows_per_group=ROWS_PER_GROUP
    )
    for own in groups:
        writer.write(own)
    (part,) = writer.close()
    return Stored(
        path=path / part["file"],
        encoding=encoding,
        schema=schema,
        num_rows=rows.num_rows,
        num_bytes=part["bytes"],
        write_s=time.perf_counter() - started,
    )


def sessions_of_users(rows: pa.Table, key: str) -> pa.Table:
    """All sessions of some users, about SAMPLE_ROWS rows."""
    users = rows.column(key).combine_chunks().flatten().to_numpy()
    return rows.filter(pa.array(users % -(-rows.num_rows // SAMPLE_ROWS) == 0)).combine_chunks()


def measure(rows: pa.Table, schema: Schema, folder: Path, name: str, repeats: int) -> dict[str, Metric]:
    ours = write(rows, schema, folder / f"{name}-all")
    metrics: dict[str, Metric] = {}
    without = {"popular_ids": {"popular_ids": False}, "sequence_store": {"sequences": False}}
    if not any(own.shared_by for own in ours.encoding.features.values()):
        del without["sequence_store"]  # no feature identifies the user
    for codec, off in without.items():
        say(f"{name}: without {codec}")
        other = write(rows, schema, folder / f"{name}-{codec}", **off)
        note = f"write {other.write_s:.1f} s without, {ours.write_s:.1f} s with"
        metrics[f"{codec}_bytes_{name}"] = compare_bytes(other.num_bytes, ours, note=note)
        metrics[f"{codec}_read_{name}"] = compare_speed(other.read, ours.read, ours, repeats)
    metrics[f"page_decoder_read_{name}"] = compare_speed(
        lambda: ours.read(kernel="reference"), ours.read, ours, repeats
    )
    return metrics


def compare_bytes(without: int, ours: Stored, *, note: str) -> Metric:
    return compare_counts(without / ours.num_rows, ours.num_bytes / ours.num_rows, unit="bytes/row", note=note)


def compare_speed(without: Callable[[], float], ours: Callable[[], float], log: Stored, repeats: int) -> Metric:
    sides = in_turns(without, ours, repeats=repeats, warm_ups=1)
    return compare(*([log.num_rows / seconds for seconds in side] for side in sides), unit="rows/s")


def read_log(preset: str, folder: Path, options: Options) -> tuple[pa.Table, Schema]:
    say(f"write {preset}")
    overrides = {"seed": options.seed}
    overrides |= {"sessions": RECD_SESSIONS[options.size]} if preset == "recd" else {}
    overrides |= {"one_in": GLOBO_ONE_IN[options.size]} if preset == "globo" else {}
    raw = make_raw_log(preset, out=folder / f"{preset}-raw", overrides=overrides)
    clustered = cluster_sessions(raw, out=folder / f"{preset}-session", layout="session")
    return read_table(clustered).combine_chunks(), Schema.load(clustered.path)


def main() -> None:
    options = parse_options(__doc__ or "", quick="a third of the sessions of recd, one user of globo in 40")
    warn_if_busy()
    metrics: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for preset in ("recd", "globo"):
            if preset == "globo" and (reason := why_no_globo()):
                skipped["globo"] = reason
                continue
            rows, schema = read_log(preset, Path(scratch), options)
            metrics |= measure(rows, schema, Path(scratch), preset, REPEATS[options.size])
    finish(options, metrics, skipped=skipped)


if __name__ == "__main__":
    main()
