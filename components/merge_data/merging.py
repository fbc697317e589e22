"""Merges the datasets of a log's partitions: the same part files, one manifest for all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from recmill.artifacts import Dataset, InputError, explain_write_errors, is_remote, refuse_foreign_folder, write_folder
from recmill.artifacts.dataset import DatasetPart
from recmill.data.schema import Schema
from recmill.progress import Progress, no_progress

LAYOUTS = ("session", "time")  # each deduplicated dataset has an encoding of its own


def merge_datasets(paths: Sequence[str], *, out: str | Path, progress: Progress = no_progress) -> Dataset:
    """Write one dataset with the rows of all. Their schemas must agree and no session may be in two of them."""
    if not paths:
        raise InputError("no partition to merge")
    loaded = [Dataset.load(path) for path in paths]
    _check_alike(loaded)
    _check_sessions(loaded, progress)
    refuse_foreign_folder(out, Dataset.manifest_name)
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder, explain_write_errors(out):
        parts: list[DatasetPart] = []
        for split in loaded[0].splits:  # parts of a split lie together
            for dataset in loaded:
                for part in dataset.split_parts(split):
                    name = f"part-{len(parts):05d}.parquet"
                    _take(Path(dataset.path, part.file), folder / name)
                    parts.append(replace(part, file=name))
        _described(loaded[0]).save(folder)
        Dataset(
            layout=loaded[0].layout,
            num_rows=sum(dataset.num_rows for dataset in loaded),
            num_sessions=sum(dataset.num_sessions for dataset in loaded),
            parts=tuple(parts),
            source={
                "name": Path(str(out)).name,
                "num_files": sum(int(dataset.source["num_files"]) for dataset in loaded),
                "bytes": sum(int(dataset.source["bytes"]) for dataset in loaded),
            },
            inputs={f"partition-{number:05d}": dataset.content_hash for number, dataset in enumerate(loaded)},
        ).seal(folder)
    return Dataset.load(out)


def _check_alike(loaded: Sequence[Dataset]) -> None:
    first = loaded[0]
    for dataset in loaded:
        if is_remote(dataset.path):
            raise InputError(f"{dataset.path}: expected a partition on a mounted volume, not a URL")
        if dataset.layout != first.layout or dataset.layout not in LAYOUTS:
            raise InputError(f"{dataset.path}: layout is {dataset.layout!r}, expected {first.layout!r} of {LAYOUTS}")
        if dataset.splits != first.splits:
            raise InputError(f"{dataset.path}: has splits {dataset.splits}, but {first.path} has {first.splits}")
        if _described(dataset) != _described(first):
            raise InputError(f"{dataset.path}/schema.json: differs from that of {first.path}")


def _described(dataset: Dataset) -> Schema:
    """The schema without facts about one partition's data."""
    return replace(Schema.load(dataset.path), info={})


def _check_sessions(loaded: Sequence[Dataset], progress: Progress) -> None:
    """A session in two partitions would become two sessions."""
    seen = np.empty(0, dtype=np.int64)
    for number, dataset in enumerate(loaded):
        columns = [pq.read_table(Path(dataset.path, part.file), columns=["session_id"]) for part in dataset.parts]
        sessions = np.unique(np.concatenate([column["session_id"].to_numpy() for column in columns]))
        shared = np.intersect1d(seen, sessions)
        if len(shared):
            raise InputError(
                f"{dataset.path}: session {shared[0]} is in an earlier partition too; partition the log by session"
            )
        seen = np.concatenate([seen, sessions])
        progress("check partitions", number + 1, len(loaded))


def _take(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # one volume: no copy
    except OSError:
        shutil.copyfile(source, target)
