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

from recmill.artifacts import (
    FORMAT_VERSION,
    Artifact,
    Dataset,
    InputError,
    dump_json,
    join_path,
    read_json,
    write_text_atomically,
)
from recmill.progress import Progress, describe
from recmill.sizes import format_bytes
from recmill.tracking.server import (
    TAG_RUN_ID,
    RunReference,
    explain_tracking_errors,
    find_run,
    impatient,
    is_tracking_off,
    load_mlflow,
    log_params,
    log_points,
)
from recmill.tracking.states import Ended, write_state

QUALITY = ("auc", "log_loss", "normalised_entropy")
REGISTERED_MODEL = "recmill-dlrm"
PROGRESS_S = 0.5  # minimum time between two lines of progress
SYSTEM_SAMPLING_S = 1.0  # with MLflow's default of 10 s, short steps would have no sample


@dataclass(kw_only=True)
class StepRun:
    """One step while it runs."""

    step: str
    workdir: str
    client: Any = None  # mlflow.MlflowClient; None if tracking is off
    mlflow_run: RunReference = field(default_factory=RunReference)
    parent_run_id: str = ""
    began: float = 0.0  # time.monotonic() at the start of the work, after connecting to MLflow
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """The path of an output of the step: RUN/name."""
        return join_path(self.workdir, name)

    def progress(self, what: str, done: int, total: int) -> None:
        """Progress as log lines `[step] what: 3 of 7 (43%)`, at most two per second."""
        self._progress(what, done, total)

    def __post_init__(self) -> None:
        self._progress = _line_progress(self.step)

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
        self.record({"written_bytes": self.metrics.get("written_bytes", 0.0) + num_bytes})
        reference = {"path": artifact.path, "content_hash": artifact.content_hash}
        self.outputs[name] = reference
        return reference

    def log_dataset(self, dataset: Dataset, *, context: str) -> None:
        """Link the dataset, by its content hash, to the step's MLflow run."""
        if not self.client:
            return
        import mlflow
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset

        source = CodeDatasetSource(tags={"path": dataset.path, "num_rows": str(dataset.num_rows)})
        digest = dataset.content_hash.removeprefix("sha256:")[:32]  # MLflow allows 36 characters
        mlflow.log_input(MetaDataset(source=source, name=dataset.layout, digest=digest), context=context)

    def log_training(self, result: Mapping[str, Any]) -> None:
        """Log settings, loss curve and evaluations of a `result.json`, by training step."""
        if not self.client:
            return
        end = time.time()
        begin = end - float(result["seconds"])
        points = [("train_loss", entry["loss"], entry["step"], begin + entry["seconds"]) for entry in result["curve"]]
        points += [
            (f"eval_{name}", entry[name], entry["step"], end) for entry in result["evaluations"] for name in QUALITY
        ]
        log_points(self.client, self.mlflow_run.run_id, points)
        log_params(self.client, self.mlflow_run.run_id, result["config"])

    def log_model(self, folder: str | Path, *, name: str = REGISTERED_MODEL) -> dict[str, str]:
        """Keep a model that `recmill export` wrote as a LoggedModel with a new registered version; gives both ids."""
        if not self.client:
            return {}
        import mlflow

        exported = Path(folder, "mlflow")
        flavour = mlflow.models.Model.load(str(exported)).flavors["python_function"]
        info = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(exported / flavour["model_code_path"]),
            artifacts={key: str(exported / entry["path"]) for key, entry in flavour["artifacts"].items()},
            pip_requirements=str(exported / "requirements.txt"),
            registered_model_name=name,
        )
        quality = {key: value for key, value in self.metrics.items() if key in QUALITY}
        mlflow.log_metrics(quality, model_id=info.model_id)
        return {"model_id": info.model_id, "model_uri": info.model_uri, "version": str(info.registered_model_version)}


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
        _enter_mlflow(running, tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", ""), parent_run_id)
        _ensure_run_record(running)
        started_at, running.began = time.time(), time.monotonic()
        yield running
        seconds = time.monotonic() - running.began
        _write_step(running, started_at=started_at, seconds=seconds)
        _leave_mlflow(running, status="FINISHED", seconds=seconds)
        write_state(folder, step, "FINISHED")
    except BaseException as error:
        if isinstance(error, InputError):
            say(step, f"error: {error}")
        elif isinstance(error, Exception):
            say(step, f"failed: {type(error).__name__}: {error}")
        status: Ended = "FAILED" if isinstance(error, Exception) else "KILLED"
        write_state(folder, step, status, error=str(error) or type(error).__name__)
        _leave_mlflow(running, status=status, seconds=time.monotonic() - running.began)
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
    write_text_atomically(join_path(workdir, "run.json"), dump_json(record))


def _ensure_run_record(running: StepRun) -> None:
    """On a cluster the first step writes run.json."""
    try:
        read_json(running.path("run.json"))
    except InputError:
        write_run_record(
            running.workdir,
            preset=str(running.inputs.get("preset", "")),
            pipeline_run_id=os.environ.get("KFP_RUN_ID", ""),
            mlflow_run=replace(running.mlflow_run, run_id=running.parent_run_id or running.mlflow_run.run_id),
        )


def _write_step(running: StepRun, *, started_at: float, seconds: float) -> None:
    record = {
        "step": running.step,
        "started_at": started_at,
        "seconds": seconds,
        "metrics": running.metrics,
        "inputs": running.inputs,
        "outputs": running.outputs,
    }
    write_text_atomically(running.path(f"steps/{running.step}.json"), dump_json(record))
    # Every finished step updates the duration of the run, so that it is correct wherever the steps run.
    run = read_json(running.path("run.json"))
    run["seconds"] = time.time() - run["started_at"]
    write_text_atomically(running.path("run.json"), dump_json(run))


def _enter_mlflow(running: StepRun, tracking_uri: str, parent_run_id: str) -> None:
    if is_tracking_off() or not tracking_uri:
        return
    mlflow = load_mlflow()
    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_system_metrics_sampling_interval(SYSTEM_SAMPLING_S)
    pipeline_run_id = os.environ.get("KFP_RUN_ID", "")
    # Removed from the environment: otherwise start_run would resume that run instead of nesting a new one.
    resumed = os.environ.pop("MLFLOW_RUN_ID", "")
    with explain_tracking_errors(tracking_uri), impatient():
        if not parent_run_id and not resumed and pipeline_run_id:
            parent_run_id = find_run(tracking_uri, pipeline_run_id=pipeline_run_id).run_id
        client = mlflow.MlflowClient(tracking_uri)
        active = mlflow.start_run(
            run_id=None if parent_run_id else resumed or None,
            experiment_id=client.get_run(parent_run_id).info.experiment_id if parent_run_id else None,
            run_name=running.step,
            parent_run_id=parent_run_id or None,
            log_system_metrics=True,
        )
        tags = {"recmill.step": running.step} | ({TAG_RUN_ID: pipeline_run_id} if pipeline_run_id else {})
        mlflow.set_tags(tags)
        log_params(client, active.info.run_id, running.inputs)
    running.client, running.parent_run_id = client, parent_run_id
    running.mlflow_run = RunReference(
        tracking_uri=tracking_uri, experiment_id=active.info.experiment_id, run_id=active.info.run_id
    )


def _leave_mlflow(running: StepRun, *, status: str, seconds: float) -> None:
    if not running.client:
        return
    import mlflow

    client, running.client = running.client, None  # only once, even if MLflow fails here
    points = [(name, value, 0, time.time()) for name, value in (running.metrics | {"seconds": seconds}).items()]
    with explain_tracking_errors(running.mlflow_run.tracking_uri):
        try:
            log_points(client, running.mlflow_run.run_id, points)
        finally:
            mlflow.end_run(status)
