"""Batch prediction as a command: `recmill predict MODEL DATA --out scores/`.

Parts are divided among processes before they start; the first process is this one. A part that is on disk is done, so
the same call again scores only what is missing, on any number of processes. Calls on several machines that share a
folder score a share of the parts each (`share`); the one that finds all parts complete writes the manifest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from recmill.artifacts import (
    InputError,
    dump_record,
    explain_write_errors,
    hash_json,
    is_remote,
    refuse_foreign_folder,
    write_text_atomically,
)
from recmill.data.ingest.splits import ALL_ROWS
from recmill.data.known_rows import KnownRows, NewReads, find_known_rows
from recmill.progress import Progress, no_progress
from recmill.training.prediction.rows import DatasetRows, LogRows, ScorePart, cut_parts, open_rows, read_batches
from recmill.training.prediction.scorer import ModelFolder
from recmill.training.prediction.scores import (
    JOB,
    MANIFEST,
    find_written,
    finish,
    load_finished,
    read_job,
    remove_leftovers,
    write_part,
)
from recmill.training.processes import die_with_parent, hold_folder, rank_environment, threads_of, torch_threads
from recmill.training.rank.dedup import DedupChoice, choose_lists

BATCH_SIZE = 8_192
ROWS_PER_PART = 262_144
DEDUP = ("auto", "off")


class PredictionFailed(RuntimeError):
    """A process failed for a reason that is not the user's input."""


def predict_scores(
    model: str | Path,
    data: str | Path,
    *,
    out: str | Path,
    split: str | None = None,
    nproc: int = 1,
    rows_per_part: int = ROWS_PER_PART,
    dedup: str = "auto",
    share: str = "",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Score every row of a dataset, of one of its splits, or of a raw log; returns the content of OUT/scores.json.

    `share` "1/4" scores the second of four shares of the parts. While others are missing, the result has "missing",
    their number, and no manifest is written.

    `model` is a checkpoint or an exported model. With `dedup="auto"`, a checkpoint computes lists that repeat inside a
    batch once. The same call again resumes: parts that were written stay as they are.
    """
    if is_remote(out):
        raise InputError(f"--out {out}: scores are written to a local or mounted folder, not to a URL")
    for name, count in (("--nproc", nproc), ("rows_per_part", rows_per_part)):
        if count < 1:
            raise InputError(f"{name} is {count}, expected 1 or more")
    if dedup not in DEDUP:
        raise InputError(f"dedup is {dedup!r}, expected one of {', '.join(DEDUP)}")
    index, count = read_share(share)
    folder, work = Path(out).absolute(), ScoringWork.open(model, data, split)
    parts = cut_parts(work.rows.groups, rows_per_part)
    own = parts[index::count]
    identity = {"model": work.model.content_hash, "data": work.rows.content_hash, "split": split or ALL_ROWS}
    job: dict[str, Any] = {
        "format_version": 1,
        "kind": "prediction",
        "model": str(model),
        "data": str(data),
        "split": split or ALL_ROWS,
        "identity": hash_json({**identity, "rows_per_part": rows_per_part}),
        "labels": list(work.model.schema.labels),
    }
    if not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir()):
        refuse_foreign_folder(folder, JOB)
    with explain_write_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(str(_locked(folder, share)), what="prediction"):
        _refuse_other_job(folder, job)
        if (folder / MANIFEST).exists():
            return load_finished(folder)
        write_text_atomically(folder / JOB, dump_record(job))
        remove_leftovers(folder, own)
        written = find_written(folder, own, job["identity"], verify=True)
        missing = [part.number for part in own if part.number not in written]
        nproc = max(1, min(nproc, len(missing)))
        told = {**job, "out": str(folder), "rows_per_part": rows_per_part, "dedup": dedup}
        told["threads"] = threads_of(0, nproc)
        with _helpers(told, [missing[rank::nproc] for rank in range(1, nproc)]):
            score_parts(work, told, parts, missing[::nproc], progress)
        num_missing = len(parts) - len(find_written(folder, parts, job["identity"])) if share else 0
        if num_missing:
            rows = sum(part.num_rows for part in own)
            return {**job, "share": share, "num_rows": rows, "num_parts": len(own), "missing": num_missing}
        return finish(folder, parts, job)


def read_share(share: str) -> tuple[int, int]:
    """(index, count) of a share "1/4"; "" is all."""
    if not share:
        return 0, 1
    index, slash, count = share.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise InputError(f"--share is {share!r}, expected INDEX/COUNT with an index from 0 to COUNT - 1, such as 0/4")
    return int(index), int(count)


def _locked(folder: Path, share: str) -> Path:
    """The folder whose lock keeps others away: that of the scores, or one per share."""
    if not share:
        return folder
    own = folder / f".share-{share.replace('/', '-of-')}"
    own.mkdir(exist_ok=True)
    return own


def _refuse_other_job(folder: Path, job: Mapping[str, Any]) -> None:
    if not (folder / JOB).exists():
        return
    before = read_job(folder)
    if before.identity != job["identity"]:
        raise InputError(
            f"{folder}: holds scores of {before.model} for {before.data} (split {before.split}), or they have "
            "changed since; give another --out or remove it"
        )


class ScoringWork:
    """A model and the rows that it scores, checked to fit."""

    def __init__(self, model: ModelFolder, rows: DatasetRows | LogRows, known: KnownRows) -> None:
        self.model, self.rows, self.known = model, rows, known

    @classmethod
    def open(cls, model: str | Path, data: str | Path, split: str | None) -> ScoringWork:
        opened, rows = ModelFolder.open(model), open_rows(data, split)
        return cls(opened, rows, find_known_rows(model, opened.schema, rows.path, rows.schema))

    def choose_dedup(self, first: ScorePart, dedup: str) -> DedupChoice:
        """What pays in the first batch of all: every process decides alike. Translated rows are not deduplicated."""
        if dedup == "off" or self.model.is_exported or self.known.rows:
            return DedupChoice()
        found = next(read_batches(self.rows, [first], batch_size=BATCH_SIZE))
        return choose_lists(found.batch.ids, self.rows.schema)


def score_parts(
    work: ScoringWork,
    job: Mapping[str, Any],
    parts: Sequence[ScorePart],
    chosen: Sequence[int],
    progress: Progress = no_progress,
) -> None:
    """Score the chosen parts and write them to the job's folder."""
    if not chosen:
        return
    dedup = work.choose_dedup(parts[0], job["dedup"])
    if dedup.groups:
        work.rows.open(dedup=dedup.groups, windows=dedup.windows)
    score = work.model.load(deduplicated=dedup.features)
    folder, total = Path(job["out"]), sum(part.num_rows for part in parts)
    found, reads = [], NewReads()
    with torch.inference_mode(), torch_threads(int(job["threads"])):
        for own in read_batches(work.rows, [parts[number] for number in chosen], batch_size=BATCH_SIZE):
            batch, counts = work.known.translate_batch(own.batch)
            reads.add(counts)
            found.append(score(batch).numpy())
            if own.keys is not None:
                write_part(folder, own.part, own.keys, np.concatenate(found), job=job, reads=reads)
                found, reads = [], NewReads()
                done = sum(part.num_rows for part in parts if (folder / part.file).exists())
                progress("predict", done, total)
    work.rows.close()


@contextmanager
def _helpers(job: Mapping[str, Any], shares: Sequence[Sequence[int]]) -> Iterator[None]:
    """Processes that score the other shares while the block scores the first; their errors are raised at its end."""
    with ExitStack() as stack:
        # Not pipes: nobody reads them until the end, and a full one would block the process.
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in shares]
        yield from _run_helpers(job, shares, logs)


def _run_helpers(job: Mapping[str, Any], shares: Sequence[Sequence[int]], logs: Sequence[IO[str]]) -> Iterator[None]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "recmill.training.prediction.helper"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env=rank_environment(int(job["threads"])),
            preexec_fn=die_with_parent,
        )
        for log in logs
    ]
    try:
        for process, share in zip(processes, shares, strict=True):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its exit code and last line say why
                process.stdin.write(json.dumps({**job, "parts": list(share)}))
                process.stdin.close()
        yield
        for number, (process, log) in enumerate(zip(processes, logs, strict=True), start=1):
            code = process.wait()
            log.seek(0)
            last = log.read().strip().rpartition("\n")[2]
            if code == 2:
                raise InputError(last)
            if code:
                raise PredictionFailed(f"process {number} failed (exit code {code}): {last}; the same command resumes")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
