"""Training as a command: check the inputs, launch the ranks, follow them, resume interrupted runs."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from recmill.artifacts import (
    Checkpoint,
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    dump_json,
    dump_record,
    explain_write_errors,
    held_folder,
    is_remote,
    join_path,
    path_exists,
    read_checked_json,
    read_json,
    refuse_foreign_folder,
    write_text_atomically,
)
from recmill.artifacts.places.scratch import remove_scratch
from recmill.artifacts.places.stores import upload_file
from recmill.data.hot.layout import layout_hot
from recmill.data.schema import Schema
from recmill.data.vocabulary import check_growth
from recmill.model.settings import RankerConfig
from recmill.progress import Progress, no_progress
from recmill.training.config import TrainConfig
from recmill.training.preload import Fork, start_module
from recmill.training.processes import (
    PROGRESS_MARK,
    ending_orphans,
    ending_stopped,
    hold_folder,
    rank_environment,
    take_folder,
    threads_of,
)
from recmill.training.switches import shared_tables, wants_hot_batches
from recmill.training.verdicts import remembered

JOB = "job.json"
LOG = "train.log"
AGENT = "recmill.training.agent"  # torchrun
LOST_RANK = r"onnection|got signal: 15"  # torchrun ends the ranks that are left
# Settings that a resumed run may change.
RESUMABLE = {"threads", "timeout_s", "checkpoint_every", "checkpoint_async", "tuning", "table_memory_bytes"}
Launcher = Callable[[Mapping[str, Any], Path, int], None]  # (job, folder of the run, number of ranks); runs to the end


class TrainingFailed(RuntimeError):
    """A rank failed for a reason that is not the user's input; the message names the rank and the log."""


def train(
    data: str | Path,
    *,
    out: str | Path,
    plan: str | Path | None = None,
    allocation: str | Path | None = None,
    start_from: str | Path | None = None,
    nproc: int = 1,
    config: TrainConfig | None = None,
    port: int = 0,
    launcher: Launcher | None = None,
    export: str | Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Train a model on a Dataset with `nproc` processes and return the content of OUT/result.json.

    The first rank exports the model to `export`, which saves another process the loading of TorchRec.

    `start_from` is the checkpoint of a model that goes on training: its weights and optimiser state are taken over, and
    rows that it lacks are new. `config` defaults to the checkpoint's then.

    `launcher` starts the ranks; by default torchrun does, on this machine. The same call again resumes an interrupted
    run from its newest checkpoint, or returns the result of a finished one.
    """
    config = config or (settings_of_checkpoint(start_from) if start_from else TrainConfig())
    folder = _resolved(out)
    parts = {"plan": plan, "allocation": allocation, "start_from": start_from}
    job = make_job(data, out=folder, nproc=nproc, config=config, **parts)
    refuse_foreign_folder(folder, JOB)
    with explain_write_errors(out):
        if not is_remote(out):
            Path(folder).mkdir(parents=True, exist_ok=True)
        with hold_folder(folder):
            refuse_other_settings(folder, job)
            write_text_atomically(join_path(folder, JOB), dump_record(job))
            if path_exists(join_path(folder, "result.json")):
                remove_scratch("job")  # of a launcher that was killed after the run had finished
            else:
                ready = lay_out_hot(job, folder, config, progress)
                ready |= {"export": str(export or ""), "owner": take_folder(folder)}
                launch = launcher or partial(launch_torchrun, port=port, progress=progress)
                with log_folder(folder) as local:
                    launch(ready, local, nproc)
            return read_checked_json(join_path(folder, "result.json"), kind="training")


@contextmanager
def log_folder(folder: str) -> Iterator[Path]:
    """The folder for the ranks' log: the run's own, or a local one whose log is uploaded when the block ends."""
    if not is_remote(folder):
        yield Path(folder)
        return
    with held_folder(purpose="train") as scratch:
        try:
            yield scratch
        except TrainingFailed as error:
            raise TrainingFailed(str(error).replace(str(scratch), folder)) from error
        finally:
            log = scratch / LOG
            if log.exists():
                upload_file(log, join_path(folder, LOG))


def make_job(
    data: str | Path,
    *,
    out: str | Path,
    plan: str | Path | None,
    allocation: str | Path | None,
    nproc: int,
    config: TrainConfig,
    start_from: str | Path | None = None,
) -> dict[str, Any]:
    """The job that ranks read, with every input checked before any process starts."""
    dataset = Dataset.load(data)
    schema = Schema.load(dataset.path)
    if nproc < 1:
        raise InputError(f"--nproc is {nproc}, expected 1 or more")
    if nproc > dataset.num_rows:
        raise InputError(f"{data}: has {dataset.num_rows} rows, fewer than the {nproc} training processes")
    for table in schema.tables:
        if table.dim % 4:
            raise InputError(
                f"{data}/schema.json: table {table.name!r} has dim {table.dim}, expected a multiple of 4 (FBGEMM)"
            )
    config.check_labels(schema.labels, where=f"{data}/schema.json")
    inputs = {"dataset": dataset.content_hash}
    if plan:
        loaded = ShardPlan.load(plan)
        inputs["plan"] = loaded.content_hash
        if loaded.world_size != nproc:
            raise InputError(f"{plan}: made for {loaded.world_size} ranks, but training has {nproc}")
        missing = sorted({table.name for table in schema.tables} ^ set(loaded.tables))
        if missing:
            raise InputError(f"{plan}: its tables are not those of {data} (differing: {', '.join(missing)})")
    if allocation:
        inputs["allocation"] = WorkerAllocation.load(allocation).content_hash
    if start_from:
        inputs["start_from"] = _check_start(start_from, data, schema, config).content_hash
    return {
        "format_version": 1,
        "kind": "job",
        "data": _resolved(data),
        "plan": _resolved(plan) if plan else None,
        "allocation": _resolved(allocation) if allocation else None,
        "start_from": _resolved(start_from) if start_from else None,
        "out": str(out),
        "config": config.to_json(),
        "inputs": inputs,
    }


def settings_of_checkpoint(path: str | Path) -> TrainConfig:
    """The settings that a checkpoint was trained with; settings that are younger than it have their default."""
    known, own = TrainConfig().to_json(), Checkpoint.load(path).config
    for name, default in known.items():
        found = own.get(name, default)
        items = found if isinstance(found, list) else []
        is_number = isinstance(default, float) and type(found) is int
        if not (is_number or type(found) is type(default)) or not all(type(item) in (int, float) for item in items):
            raise InputError(f"{path}/checkpoint.json: config.{name} is {str(found)[:40]!r}, unlike {default!r}")
    return TrainConfig.from_json(known | {k: v for k, v in own.items() if k in known})


def _check_start(start_from: str | Path, data: str | Path, schema: Schema, config: TrainConfig) -> Checkpoint:
    """The checkpoint, if a model like it can be trained on with this data and these settings."""
    checkpoint = Checkpoint.load(start_from)
    trained = Schema.from_json(checkpoint.schema, where=f"{start_from}/checkpoint.json")
    check_growth(trained, schema, checkpoint=str(start_from), data=str(data))
    before, now = settings_of_checkpoint(start_from), config
    for name in (*RankerConfig.__dataclass_fields__, "table_optimiser"):
        if name != "dropout" and getattr(before, name) != getattr(now, name):
            raise InputError(
                f"{start_from}: was trained with {name}={getattr(before, name)}, not {getattr(now, name)}: the model "
                "must be the same to train on"
            )
    return checkpoint


def lay_out_hot(job: Mapping[str, Any], folder: str | Path, config: TrainConfig, progress: Progress) -> dict[str, Any]:
    """The job with the data laid out for hot batches where the run trains them; laid out once per run."""
    plan = ShardPlan.load(job["plan"]) if job["plan"] else None
    if not wants_hot_batches(plan, config) or plan is None:
        return dict(job)
    known = remembered(job, num_ranks=plan.world_size)
    if known and not wants_hot_batches(plan, known.settle(config)):
        return dict(job)
    target = join_path(folder, "layout")
    if not path_exists(join_path(target, Dataset.manifest_name)):
        layout_hot(job["data"], plan, out=target, keep_ids=shared_tables(plan, config), progress=progress)
    return {**job, "hot_data": target}


def _resolved(path: str | Path) -> str:
    return str(path) if is_remote(path) else str(Path(path).absolute())


def layout_note(result: Mapping[str, Any]) -> list[str]:
    """One line if a run read data in another layout than its plan chose: data is stored before it is planned."""
    stored, planned = result["data"]["layout"], result["data"].get("planned_layout")
    if planned in (None, stored):
        return []
    return [f"note: the data has layout {stored!r}, the plan chose {planned!r} (recmill cluster --layout {planned})"]


def refuse_other_settings(folder: str, job: Mapping[str, Any]) -> None:
    """Raise if the folder holds a run with other data or settings; how many ranks it used does not matter."""
    if not path_exists(join_path(folder, JOB)):
        return
    previous = read_checked_json(join_path(folder, JOB), kind="job")
    # A folder may be older than a setting: it ran with the default.
    before = {**TrainConfig().to_json(), **previous["config"], "dataset": previous["inputs"]["dataset"]}
    now = {**job["config"], "dataset": job["inputs"]["dataset"], "start_from": job["inputs"].get("start_from")}
    before["start_from"] = previous["inputs"].get("start_from")
    differing = [key for key in now if before.get(key) != now[key] and key not in RESUMABLE]
    if differing:
        changes = "; ".join(f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in differing)
        raise InputError(f"{folder}: holds a run with other settings ({changes}); give another --out or remove it")


def launch_torchrun(job: Mapping[str, Any], folder: Path, nproc: int, *, port: int, progress: Progress) -> None:
    """Run all ranks on this machine to their end; raise InputError or TrainingFailed if one of them fails."""
    if port:
        _check_port(port)
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)] if port else ["--standalone"]
    threads = threads_of(job["config"]["threads"], nproc)
    with held_folder(purpose="job") as scratch:
        job_path = scratch / JOB
        job_path.write_text(dump_json({**job, "launched_at": time.monotonic()}), encoding="utf-8")
        arguments = [*rendezvous, *rank_arguments(nproc, job_path)]
        log_path = folder / LOG
        with open(log_path, "a", encoding="utf-8") as log:
            process = start_module(AGENT, arguments, environment=rank_environment(threads), stderr=log)
            watch = ending_stopped(job["config"]["timeout_s"], others=[process.pid])
            try:
                with ending_orphans(process, str(job_path)), watch as stopped:
                    follow_output(process, log, progress)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
                raise
        if process.returncode:
            cause = "; ".join(stopped) or rank_failure(scratch)
            cause = cause or _silent_ranks(scratch, nproc, process.returncode)
            raise TrainingFailed(f"{cause}; see {log_path}; run the same command to resume from the newest checkpoint")


def rank_arguments(num_local: int, job_path: Path) -> list[str]:
    """What the agent is told, wherever it runs: so many ranks on this node, and the job that they train."""
    return ["--nproc-per-node", str(num_local), str(job_path)]


def follow_output(process: subprocess.Popen[str] | Fork, log: TextIO, progress: Progress) -> None:
    """Wait for a process: lines of progress in its output are passed on, others are written to `log`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PROGRESS_MARK):
            what, done, total = json.loads(line.removeprefix(PROGRESS_MARK))
            progress(what, done, total)
        else:
            log.write(line)
    process.wait()


def rank_failure(reports_folder: Path, *, lost: str = LOST_RANK) -> str:
    """The first failure among the ranks' reports, or ""; a user's error is raised as InputError.

    Messages that match `lost` are those of ranks that lost another one, and not the cause.
    """
    reports = [read_json(path) for path in sorted(reports_folder.glob("error-*.json"))]
    for report in reports:
        if report["kind"] == "input":
            raise InputError(report["message"])
    # A rank that was killed leaves no report, and the others then only complain about the lost connection.
    for report in reports:
        if not re.search(lost, report["message"]):
            return f"rank {report['rank']} failed: {' '.join(str(report['message']).split())[:300]}"
    return ""


def _silent_ranks(reports_folder: Path, nproc: int, returncode: int) -> str:
    silent = [str(rank) for rank in range(nproc) if not (reports_folder / f"error-{rank}.json").exists()]
    return f"rank {', '.join(silent) or 'unknown'} exited without a report (torchrun exit code {returncode})"


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot be used ({error.strerror}); give another one or omit --port"
            ) from None
