"""One step of a pipeline run: its inputs, outputs and metrics, in RUN/steps/<step>.json and a nested MLflow run.

How a step finds its MLflow run (the first match wins):

    parent run id given     a new run nested below it       (`recmill run`)
    MLFLOW_RUN_ID set       that run is resumed             (a cluster whose pipeline server tracks runs itself)
    KFP_RUN_ID set          a new run nested below the one that carries the tag kfp.pipeline_run_id
    none of these           a separate run
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec

from recmill.artifacts import (
    FORMAT_VERSION,
    Artifact,
    Dataset,
    InputError,
    dump_record,
    join_path,
    read_checked_json,
    read_json,
    write_text_atomically,
)
from recmill.progress import Progress, describe, seconds_since_start
from recmill.sizes import format_bytes
from recmill.tracking.recorder import JOURNAL_FOLDER, REFERENCE, Journal, MlflowRecorder, Recorder
from recmill.tracking.server import RunReference, find_server, is_tracking_off
from recmill.tracking.states import Ended, write_state

QUALITY = ("auc", "log_loss", "normalised_entropy")  # measured at every evaluation
HEADLINE = (*QUALITY, "gauc", "ndcg_at_10", "recall_at_10", "mrr", "calibration", "ece")  # of the finished model
REGISTERED_MODEL = "recmill-dlrm"
PROGRESS_S = 0.5  # minimum time between two lines of progress


@dataclass(kw_only=True)
class StepRun:
    """One step while it runs."""

    step: str
    workdir: str
    recorder: Recorder | None = None  # None if tracking is off
    mlflow_run: RunReference = field(default_factory=RunReference)
    parent_run_id: str = ""
    began: float = 0.0  # time.monotonic() at the start of the work, after connecting to MLflow
    startup_seconds: float = 0.0  # from the start of the process to the start of the work; training adds its ranks'
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """The path of an output of the step: RUN/name."""
        return join_path(self.workdir, name)

    def __post_init__(self) -> None:
        self.progress = _line_progress(self.step)

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Record metrics; unknown values (None, NaN) are omitted, because JSON cannot represent them."""
        known = {name: float(value) for name, value in metrics.items() if value is not None}
        self.metrics |= {name: value for name, value in known.items() if math.isfinite(value)}

    def count(self, num_rows: int) -> None:
        """Record the number of rows that the step has processed and the rate."""
        self.record({"num_rows": num_rows, "rows_per_s": num_rows / max(time.monotonic() - self.began, 1e-9)})

    def wrote(self, name: str, artifact: Artifact) -> dict[str, str]:
        """Record an artifact as an output and return the reference that the next step needs."""
        num_bytes = sum(entry.bytes for entry in artifact.files)
        return self.wrote_files(name, artifact.path, content_hash=artifact.content_hash, num_bytes=num_bytes)

    def wrote_files(self, name: str, path: str, *, content_hash: str, num_bytes: int) -> dict[str, str]:
        """The same for files that are no artifact of recmill, such as a raw log."""
        self.record({"written_bytes": self.metrics.get("written_bytes", 0.0) + num_bytes})
        reference = {"path": path, "content_hash": content_hash}
        self.outputs[name] = reference
        return reference

    def log_dataset(self, dataset: Dataset, *, context: str) -> None:
        """Link the dataset, by its content hash, to the step's MLflow run."""
        if self.recorder:
            digest = dataset.content_hash.removeprefix("sha256:")[:32]  # MLflow allows 36 characters
            tags = {"path": dataset.path, "num_rows": str(dataset.num_rows)}
            self.recorder.dataset(name=dataset.layout, digest=digest, tags=tags, context=context)

    def log_training(self, result: Mapping[str, Any]) -> None:
        """Log settings, loss curve and evaluations of a `result.json`, by training step."""
        if not self.recorder:
            return
        end = time.time()
        begin = end - float(result["seconds"])
        points = [("train_loss", entry["loss"], entry["step"], begin + entry["seconds"]) for entry in result["curve"]]
        points += [
            (f"eval_{name}", entry[name], entry["step"], end) for entry in result["evaluations"] for name in QUALITY
        ]
        self.recorder.points(points)
        self.recorder.params(result["config"])
        decided = {entry["switch"]: entry for entry in result.get("decisions", ())}
        told = {name: f"{'on' if entry['is_on'] else 'off'}: {entry['reason']}" for name, entry in decided.items()}
        self.recorder.params({f"decided.{name}": text for name, text in told.items()})

    def log_model(self, folder: str | Path, *, name: str = REGISTERED_MODEL) -> dict[str, str]:
        """Keep a model that `recmill export` wrote as a LoggedModel with a new registered version.

        Returns both ids, unless the pipeline's process registers the model later.
        """
        if not self.recorder:
            return {}
        quality = {key: value for key, value in self.metrics.items() if key in HEADLINE}
        return self.recorder.model(folder=str(folder), name=name, quality=quality)

    def mark_model(
        self, version: str, *, stage: str, reason: str, replaces: str = "", name: str = REGISTERED_MODEL
    ) -> None:
        """Mark the registered version of this run ("": the pipeline's process finds it) with its stage, and why."""
        if self.recorder:
            self.recorder.stage(name=name, version=version, stage=stage, reason=reason, replaces=replaces)


@contextmanager
def step_run(
    step: str,
    *,
    workdir: str,
    tracking_uri: str = "",
    parent_run_id: str = "",
    inputs: Mapping[str, Any] | None = None,
    subfolder: str = "",
) -> Iterator[StepRun]:
    """Run the body as one step: log its start, end or failure on standard error, and record its metrics.

    `subfolder` of `workdir` is for steps that run several times in parallel.
    """
    say(step, "started")
    folder = join_path(workdir, subfolder) if subfolder else workdir
    running = StepRun(step=step, workdir=folder, inputs=dict(inputs or {}))
    running.began = time.monotonic()
    try:
        write_state(folder, step, "RUNNING")
        _open_recorder(running, tracking_uri or find_server(), parent_run_id)
        _ensure_run_record(running)
        started_at, running.began = time.time(), time.monotonic()
        running.startup_seconds = seconds_since_start()
        yield running
        seconds = time.monotonic() - running.began
        _write_step(running, started_at=started_at, seconds=seconds)
        _close_recorder(running, status="FINISHED", seconds=seconds)
        write_state(folder, step, "FINISHED")
    except BaseException as error:
        if isinstance(error, InputError):
            say(step, f"error: {error}")
        elif isinstance(error, Exception):
            say(step, f"failed: {type(error).__name__}: {error}")
        status: Ended = "FAILED" if isinstance(error, Exception) else "KILLED"
        write_state(folder, step, status, error=str(error) or type(error).__name__)
        _close_recorder(running, status=status, seconds=time.monotonic() - running.began)
        raise
    say(step, ": ".join(filter(None, (f"done in {seconds:.1f} s", describe_metrics(running.metrics)))))


def say(step: str, text: str) -> None:
    """Print one log line of the step; `recmill run` reads these lines too."""
    print(f"[{step}] {' '.join(text.split())}", file=sys.stderr, flush=True)


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """The numbers of a step that people look for, in one phrase; "" if it has none."""
    parts = []
    for name, unit in (("rows_per_s", "rows/s"), ("samples_per_s", "samples/s")):
        if name in metrics:
            parts.append(f"{metrics[name]:,.0f} {unit}")
    if "auc" in metrics:
        parts.append(f"AUC {metrics['auc']:.4f}")
    if metrics.get("written_bytes"):
        parts.append(format_bytes(metrics["written_bytes"]))
    return ", ".join(parts)


def _line_progress(step: str) -> Progress:
    """Progress as log lines `[step] what: 3 of 7 (43%)`, at most two per second."""
    shown = -PROGRESS_S

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < PROGRESS_S and not 0 < total <= done:
            return
        shown = now
        say(step, describe(what, done, total))

    return show


def write_run_record(
    workdir: str | Path,
    *,
    preset: str,
    pipeline_run_id: str,
    mlflow_run: RunReference,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """RUN/run.json of a run that starts now."""
    record = {
        "format_version": FORMAT_VERSION,
        "kind": "run",
        "name": str(workdir).rstrip("/").rsplit("/", 1)[-1],
        "preset": preset,
        "arguments": dict(arguments or {}),
        "pipeline_run_id": pipeline_run_id,
        "mlflow": mlflow_run.to_json(),
        "started_at": time.time(),
        "seconds": 0.0,
    }
    write_text_atomically(join_path(workdir, "run.json"), dump_record(record))


def name_mlflow_run(workdir: str | Path, run: RunReference) -> None:
    """Enter the MLflow run in RUN/run.json."""
    record = read_checked_json(join_path(workdir, "run.json"))
    if record["mlflow"] != run.to_json():
        write_text_atomically(join_path(workdir, "run.json"), dump_record(record | {"mlflow": run.to_json()}))


def _ensure_run_record(running: StepRun) -> None:
    """On a cluster the first step writes run.json; of a local run, MLflow's part is known once MLflow is open."""
    filesystem, record = fsspec.core.url_to_fs(running.path("run.json"))
    if not filesystem.exists(record):
        write_run_record(
            running.workdir,
            preset=str(running.inputs.get("preset", "")),
            pipeline_run_id=os.environ.get("KFP_RUN_ID", ""),
            mlflow_run=replace(running.mlflow_run, run_id=running.parent_run_id or running.mlflow_run.run_id),
        )
        return
    opened = Path(os.environ.get(JOURNAL_FOLDER, ""), REFERENCE)
    if JOURNAL_FOLDER in os.environ and opened.exists():
        name_mlflow_run(running.workdir, RunReference(**read_json(opened)))


def _write_step(running: StepRun, *, started_at: float, seconds: float) -> None:
    record = {
        "step": running.step,
        "started_at": started_at,
        "seconds": seconds,
        "startup_seconds": running.startup_seconds,
        "metrics": running.metrics,
        "inputs": running.inputs,
        "outputs": running.outputs,
    }
    write_text_atomically(running.path(f"steps/{running.step}.json"), dump_record(record))
    # Every finished step updates the duration of the run, so that it is correct wherever the steps run.
    run = read_checked_json(running.path("run.json"))
    run["seconds"] = time.time() - run["started_at"]
    write_text_atomically(running.path("run.json"), dump_record(run))


def _open_recorder(running: StepRun, tracking_uri: str, parent_run_id: str) -> None:
    if is_tracking_off() or not tracking_uri:
        return
    if journals := os.environ.get(JOURNAL_FOLDER):
        running.recorder = Journal(journals, step=running.step, inputs=running.inputs)
        return
    opened = MlflowRecorder(running.step, tracking_uri=tracking_uri, parent_run_id=parent_run_id, inputs=running.inputs)
    running.recorder, running.mlflow_run, running.parent_run_id = opened, opened.run, opened.parent_run_id


def _close_recorder(running: StepRun, *, status: str, seconds: float) -> None:
    if running.recorder:
        recorder, running.recorder = running.recorder, None  # only once, even if MLflow fails here
        times = {"seconds": seconds, "startup_seconds": running.startup_seconds}
        recorder.leave(status=status, metrics=running.metrics | times)
