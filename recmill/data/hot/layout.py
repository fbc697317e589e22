"""Lays a dataset out for hot batches: samples that read only hot rows are stored apart from the others.

    dataset/                          laid out/
      part-00000.parquet  train   ->    hot/part-00000.parquet    split "hot": ids are slots of the hot rows
                                        cold/part-00000.parquet   split "cold": ids are rows, as before
      part-00001.parquet  test    ->    part-00001.parquet        split "test", the same file
                                        hot/schema.json           num_rows: hot rows of each table

A batch of either split is all hot or all cold. The layout stays: a deduplicated dataset stays deduplicated. Rows keep
their order, and the samples of a session in one split stay together in one row group. `sessions` decides about a
session with samples of both kinds: "whole" makes all of it cold, "split" divides it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill.artifacts import (
    Dataset,
    InputError,
    ShardPlan,
    explain_write_errors,
    is_remote,
    join_path,
    record_json,
    refuse_foreign_folder,
    write_folder,
)
from recmill.data.dataset import load_encoding, open_dataset
from recmill.data.hot.remap import HotRemap, load_hot_rows
from recmill.data.hot.rows import find_hot_samples, take_samples, transform_rows
from recmill.data.ingest.parts import PartFile
from recmill.data.ingest.splits import StoredGroup, split_groups
from recmill.data.schema import Schema
from recmill.data.storage.checks import first_line
from recmill.data.storage.deduplicated import decode_rows
from recmill.data.storage.encoding import Encoding, FeatureEncoding, columns_of
from recmill.data.storage.options import writer_options
from recmill.data.storage.record_format import record_format
from recmill.data.storage.writer import PartFormat, PartWriter, SplitRows
from recmill.progress import Progress, no_progress

HOT, COLD = "hot", "cold"
SESSIONS = ("whole", "split")
ROWS_PER_GROUP = 8_192
ROWS_PER_PART = 1_000_000
# Slots are small numbers: zstd 6 makes files no smaller (within 1%) and writes 10.8 instead of 17.1 M ids per second of
# one core.
COMPRESSION_LEVEL = 1
# Share of a row group's rows. Source groups end with a session, so they are some rows short: closing a group here keeps
# their boundaries, and a dataset whose samples are all hot is read in exactly the order of its source.
FULL_ENOUGH = 0.75


def layout_hot(
    dataset: Dataset | str | Path,
    plan: ShardPlan | str | Path,
    *,
    out: str | Path,
    sessions: str | None = None,
    keep_ids: Collection[str] | None = None,
    rows_per_group: int | None = None,
    progress: Progress = no_progress,
) -> Dataset:
    """Write the dataset with the splits "hot" and "cold" in place of "train"; other splits stay as they are.

    Hot rows are those of the plan's hot set; every other id, even an unknown one, is cold. `sessions` defaults to the
    plan's choice. Tables named in `keep_ids` (default: those that the plan lets share parameters) are on every rank
    anyway: they make no sample cold and keep their ids. Transforms of ids are applied here, once, and leave the schema.
    Row groups default to the size of the source's, at most 8,192 rows: epochs permute row groups, so larger ones would
    mix samples less than the source does.
    """
    dataset = open_dataset(dataset)
    plan = plan if isinstance(plan, ShardPlan) else ShardPlan.load(plan)
    refuse_foreign_folder(out, Dataset.manifest_name)
    if HOT in dataset.splits or COLD in dataset.splits:
        raise InputError(f"{dataset.path}: is laid out for hot batches already; give the dataset it was made from")
    chosen = sessions or (plan.hot_set.sessions if plan.hot_set else "whole")
    if chosen not in SESSIONS:
        raise InputError(f"sessions is {chosen!r}, expected one of {', '.join(SESSIONS)}")
    shared = plan.shared.tables if plan.shared else ()
    kept = frozenset(shared if keep_ids is None else keep_ids)
    work = _HotLayout(dataset, plan, sessions=chosen, keep_ids=kept, rows_per_group=rows_per_group)
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder, explain_write_errors(out):
        parts = work.write(folder, progress)
        hot_rows = sum(part["num_rows"] for part in parts if part["split"] == HOT)
        cold_rows = sum(part["num_rows"] for part in parts if part["split"] == COLD)
        body = {
            "layout": dataset.layout,
            "num_rows": sum(part["num_rows"] for part in parts),
            "num_sessions": dataset.num_sessions,
            "parts": parts,
            "source": dict(dataset.source),
            **({"encoding": work.encoding.to_json()} if work.encoding else {}),
            "hot": {
                "plan_hash": plan.content_hash,
                "sessions": chosen,
                "num_hot": hot_rows,
                "num_cold": cold_rows,
                "sample_share": hot_rows / max(hot_rows + cold_rows, 1),
                "tables": {name: len(rows) for name, rows in work.remap.hot_rows.items()},
            },
        }
        work.schema.save(folder)
        if hot_rows:
            _hot_schema(work.schema, work.remap.hot_rows).save(folder / HOT)
        Dataset.of_json(body, inputs={"dataset": dataset.content_hash, "plan": plan.content_hash}).seal(folder)
    return Dataset.load(out)


class _HotLayout:
    """The work of one call."""

    def __init__(
        self,
        dataset: Dataset,
        plan: ShardPlan,
        *,
        sessions: str,
        keep_ids: frozenset[str],
        rows_per_group: int | None,
    ) -> None:
        self.dataset, self.sessions = dataset, sessions
        self.groups = split_groups(dataset, "train")
        largest = max((group.num_rows for group in self.groups), default=ROWS_PER_GROUP)
        self.rows_per_group = rows_per_group or min(largest, ROWS_PER_GROUP)
        self.stored = Schema.load(dataset.path)
        self.stored_encoding = load_encoding(dataset, self.stored) if dataset.layout == "deduplicated" else None
        self.encoding = without_codecs(self.stored_encoding) if self.stored_encoding else None
        hot_rows = {name: rows for name, rows in load_hot_rows(plan).items() if name not in keep_ids}
        missing = [table.name for table in self.stored.tables if table.name not in {*hot_rows, *keep_ids}]
        if missing:
            raise InputError(f"{plan.path}: its hot set lacks the tables {', '.join(missing)} of {dataset.path}")
        num_rows = {table.name: table.num_rows for table in self.stored.tables}
        self.remap = HotRemap(hot_rows, num_rows)
        self.has_transforms = any(feature.transforms for feature in self.stored.id_features)
        plain = [f if f.kind == "dense" else replace(f, transforms=()) for f in self.stored.features]
        self.schema = replace(self.stored, features=tuple(plain))

    def write(self, folder: Path, progress: Progress) -> list[dict[str, Any]]:
        """Write all files; the parts as the manifest lists them, hot ones first."""
        writers = {split: self._open(folder, split) for split in (HOT, COLD)}
        done, total = 0, sum(group.num_rows for group in self.groups)
        for rows in self._read(self.groups):
            is_hot, slots = find_hot_samples(rows, self.schema, self.remap)
            if self.sessions == "whole":
                is_hot = _only_whole_sessions(rows.column("session_id").to_numpy(), is_hot)
            writers[HOT].add(take_samples(rows, self.schema, is_hot, slots=slots))
            writers[COLD].add(take_samples(rows, self.schema, ~is_hot))
            done += rows.num_rows
            progress("lay out samples", done, total)
        parts = [part for writer in writers.values() for part in writer.close()]
        return parts + self._write_others(folder)

    def _open(self, folder: Path, split: str) -> _GroupWriter:
        target = folder / split
        target.mkdir(exist_ok=True)

        def open_parts(first: pa.Table) -> PartWriter:
            form = self._choose_format(first)
            return PartWriter(
                folder=str(target), prefix="part", form=form, split_names=[split], rows_per_part=ROWS_PER_PART
            )

        return _GroupWriter(split, open_parts, self.rows_per_group)

    def _choose_format(self, rows: pa.Table) -> PartFormat:
        """The format of the parts that begin with the row group `rows`."""
        if self.encoding is not None:
            return record_format(rows, self.schema, self.encoding, {}, levels=[COMPRESSION_LEVEL])
        options = writer_options(rows.schema, self.dataset.layout)
        return PartFormat(schema=rows.schema, options={**options, "compression_level": COMPRESSION_LEVEL})

    def _read(self, groups: list[StoredGroup]) -> Iterator[pa.Table]:
        """Row group by row group, ids as the tables will see them. Opens each file once: footers are slow to read."""
        wanted = self.stored.arrow_schema()
        columns = wanted.names
        if self.stored_encoding is not None:
            stored = (own for name in columns for own in columns_of(name, self.stored, self.stored_encoding))
            columns = list(dict.fromkeys(stored))
        footers = {part.file: part.footer_sha256 for part in self.dataset.parts}
        for file, own in groupby(groups, key=lambda group: group.file):
            path = join_path(self.dataset.path, file)
            opened = PartFile(path, columns=columns, label=self.stored.labels[0], footer_sha256=footers[file])
            with closing(opened) as part:
                for group in own:
                    part.check(group)
                    rows = _decode(part, group)
                    if self.stored_encoding is not None:
                        rows = pa.Table.from_batches([decode_rows(rows, self.stored, self.stored_encoding)])
                    rows = rows.select(wanted.names).cast(wanted)
                    yield transform_rows(rows, self.stored) if self.has_transforms else rows

    def _write_others(self, folder: Path) -> list[dict[str, Any]]:
        if self.dataset.splits == ["train"]:  # readers would hold out some of its row groups
            return self._rewrite(folder, "test")
        parts: list[dict[str, Any]] = []
        for split in [name for name in self.dataset.splits if name != "train"]:
            if self.has_transforms or self.encoding is not None:
                parts += self._rewrite(folder, split)
                continue
            for part in self.dataset.split_parts(split):
                _link(join_path(self.dataset.path, part.file), folder / part.file)
                parts.append(record_json(part))
        return parts

    def _rewrite(self, folder: Path, split: str) -> list[dict[str, Any]]:
        writer = self._open(folder, split)
        for rows in self._read(split_groups(self.dataset, split)):
            writer.add(rows)
        return writer.close()


def without_codecs(encoding: Encoding) -> Encoding:
    """The encoding without the codecs that trade time for bytes: a run reads the files every epoch, then drops them."""
    plain = {name: FeatureEncoding(group=own.group, windows=own.windows) for name, own in encoding.features.items()}
    return Encoding(features=plain)


def _decode(part: PartFile, group: StoredGroup) -> pa.Table:
    try:
        table = part.decode(group.index, part.read(group.index))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{part.path}, row group {group.index}: the Parquet data cannot be read ({first_line(error)})"
        ) from error
    assert isinstance(table, pa.Table), "the part was opened without bounds"
    return table


class _GroupWriter:
    """Collects pieces of row groups, each of whole sessions, until they fill a row group of the split's parts."""

    def __init__(self, split: str, open_parts: Callable[[pa.Table], PartWriter], rows_per_group: int) -> None:
        """`open_parts` returns the writer of the parts, given the rows of their first row group."""
        self.split, self.open_parts, self.rows_per_group = split, open_parts, rows_per_group
        self.writer: PartWriter | None = None
        self.pending: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self.pending.append(rows)
        if sum(piece.num_rows for piece in self.pending) >= FULL_ENOUGH * self.rows_per_group:
            self._flush()

    def _flush(self) -> None:
        rows = pa.concat_tables(self.pending).combine_chunks()
        self.pending = []
        self.writer = self.writer or self.open_parts(rows)
        self.writer.write(SplitRows(split=0, rows=rows))

    def close(self) -> list[dict[str, Any]]:
        """Write what is left. Returns the parts as the manifest lists them."""
        if self.pending:
            self._flush()
        parts = self.writer.close() if self.writer else []
        return [{**part, "file": f"{self.split}/{part['file']}"} for part in parts]


def _only_whole_sessions(session_R: npt.NDArray[np.int64], is_hot: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Hot samples of sessions that have no cold ones in this row group, which holds whole sessions."""
    if (session_R[1:] >= session_R[:-1]).all():
        place_R = np.cumsum(np.diff(session_R, prepend=session_R[:1]) != 0)
    else:  # the time layout
        place_R = np.unique(session_R, return_inverse=True)[1]
    num_cold = np.bincount(place_R, weights=~is_hot)
    return np.asarray(num_cold[place_R] == 0)


def _hot_schema(schema: Schema, hot_rows: Mapping[str, npt.NDArray[np.int64]]) -> Schema:
    features = [
        replace(f, num_rows=max(len(hot_rows[f.table]), 1)) if f.kind != "dense" and f.table in hot_rows else f
        for f in schema.features
    ]
    return replace(schema, features=tuple(features))


def _link(source: str, target: Path) -> None:
    """A hard link to the file where the file system can, otherwise a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_remote(source):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    filesystem, name = fsspec.core.url_to_fs(source)
    filesystem.get_file(name, str(target))
