"""Training as a command: check the inputs, start torchrun, follow it, resume what was interrupted."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.artifacts import (
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    dump_json,
    explain_write_errors,
    is_remote,
    read_json,
    refuse_foreign_folder,
    write_text_atomically,
)
from recmill.data.schema import Schema
from recmill.progress import Progress, no_progress
from recmill.training.config import TrainConfig
from recmill.training.processes import PROGRESS_MARK, die_with_parent, ending_orphans, rank_environment, threads_of
from recmill.training.switches import shared_tables, wants_hot_batches

JOB = "job.json"
LOCK_WAIT_S = 15
Launcher = Callable[[Mapping[str, Any], Path, int], None]  # (job, folder of the run, number of ranks)


class TrainingFailed(RuntimeError):
    """A rank died for a reason that is not the user's input; the message names the rank and the log."""


def train(
    data: str | Path,
    *,
    out: str | Path,
    plan: str | Path | None = None,
    allocation: str | Path | None = None,
    nproc: int = 1,
    config: TrainConfig | None = None,
    port: int = 0,
    launcher: Launcher | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Train a model on a Dataset with `nproc` processes and give the content of OUT/result.json.

    `launcher` starts the ranks in another way than torchrun on this machine: on other nodes, or another network.
    The same call again continues an interrupted run from its newest checkpoint, or gives the result of a finished one.
    """
    config = config or TrainConfig()
    if is_remote(out):
        raise InputError(f"--out {out}: training writes to a local or mounted folder, not to a URL")
    folder = Path(out).absolute()
    job = make_job(data, out=folder, plan=plan, allocation=allocation, nproc=nproc, config=config)
    refuse_foreign_folder(folder, JOB)
    with explain_write_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        refuse_other_settings(folder, job)
        write_text_atomically(folder / JOB, dump_json(job))
        if not (folder / "result.json").exists():
            job = lay_out_hot(job, folder, config, progress)
            if launcher:
                launcher(job, folder, nproc)
            else:
                launch(job, folder=folder, nproc=nproc, port=port, progress=progress)
        return read_json(folder / "result.json")


def make_job(
    data: str | Path,
    *,
    out: Path,
    plan: str | Path | None,
    allocation: str | Path | None,
    nproc: int,
    config: TrainConfig,
) -> dict[str, Any]:
    """What the ranks need to know, with every input checked before any process starts."""
    dataset = Dataset.load(data)
    schema = Schema.load(dataset.path)
    if nproc < 1:
        raise InputError(f"--nproc is {nproc}, expected 1 or more")
    if nproc > dataset.num_rows:
        raise InputError(f"{data}: has {dataset.num_rows} rows, fewer than the {nproc} processes asked for")
    for table in schema.tables:
        if table.dim % 4:
            raise InputError(
                f"{data}/schema.json: table {table.name!r} has dim {table.dim}, FBGEMM wants a multiple of 4"
            )
    inputs = {"dataset": dataset.content_hash}
    if plan:
        loaded = ShardPlan.load(plan)
        inputs["plan"] = loaded.content_hash
        if loaded.world_size != nproc:
            raise InputError(f"{plan}: made for {loaded.world_size} ranks, training was asked for {nproc}")
        missing = sorted({table.name for table in schema.tables} ^ set(loaded.body["tables"]))
        if missing:
            raise InputError(f"{plan}: its tables are not those of {data} (differing: {', '.join(missing)})")
    if allocation:
        inputs["allocation"] = WorkerAllocation.load(allocation).content_hash
    return {
        "format_version": 1,
        "kind": "job",
        "data": _resolved(data),
        "plan": _resolved(plan) if plan else None,
        "allocation": _resolved(allocation) if allocation else None,
        "out": str(out),
        "config": config.to_json(),
        "inputs": inputs,
    }


def lay_out_hot(job: Mapping[str, Any], folder: Path, config: TrainConfig, progress: Progress) -> dict[str, Any]:
    """The job with data laid out for hot batches, where the plan and the settings want them. Laid out once a run."""
    plan = ShardPlan.load(job["plan"]) if job["plan"] else None
    if not wants_hot_batches(plan, config) or plan is None:
        return dict(job)
    from recmill.data.hot.layout import layout_hot  # loads torch, which the launcher can do without

    target = folder / "layout"
    if not (target / Dataset.manifest_name).exists():
        shared = shared_tables(plan, config)
        layout_hot(job["data"], plan, out=target, keep_ids=shared, progress=progress)
    return {**job, "hot_data": str(target)}


def _resolved(path: str | Path) -> str:
    return str(path) if is_remote(path) else str(Path(path).absolute())


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep a second training out of `folder`. Ranks of a run that was just killed get a moment to go."""
    with open(folder / ".lock", "w") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(f"{folder}: another training is writing to this folder") from None
                time.sleep(0.2)
        yield


def refuse_other_settings(folder: Path, job: Mapping[str, Any]) -> None:
    """Raise if the folder holds a run with other data or settings; how many ranks it used does not matter."""
    if not (folder / JOB).exists():
        return
    previous = read_json(folder / JOB)
    # A folder may be older than a setting: it ran with the default.
    before = {**TrainConfig().to_json(), **previous["config"], "dataset": previous["inputs"]["dataset"]}
    now = {**job["config"], "dataset": job["inputs"]["dataset"]}
    free = {"threads", "timeout_s", "checkpoint_every", "tuning", "table_memory_bytes"}
    differing = [key for key in now if before.get(key) != now[key] and key not in free]
    if differing:
        changes = "; ".join(f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in differing)
        raise InputError(f"{folder}: holds a run with other settings ({changes}); give another --out or remove it")


def launch(job: Mapping[str, Any], *, folder: Path, nproc: int, port: int, progress: Progress) -> None:
    """Run torchrun to its end; raise InputError or TrainingFailed if a rank did not make it."""
    if port:
        _check_port(port)
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)] if port else ["--standalone"]
    with tempfile.TemporaryDirectory(prefix="recmill-train-") as scratch:
        job_path = Path(scratch) / JOB
        job_path.write_text(dump_json(job), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(nproc)]
        command += ["-m", "recmill.training.rank.worker", str(job_path)]
        environment = {
            **rank_environment(),
            "OMP_NUM_THREADS": str(threads_of(job["config"]["threads"], nproc)),
            "PYTHONWARNINGS": "ignore",
        }
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        log_path = folder / "train.log"
        with open(log_path, "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                preexec_fn=die_with_parent,
            )
            try:
                with ending_orphans(process, str(job_path)):
                    _follow(process, log, progress)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
                raise
        if process.returncode:
            _raise_failure(Path(scratch), nproc, process.returncode, log_path)


def _follow(process: subprocess.Popen[str], log: Any, progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PROGRESS_MARK):
            what, done, total = json.loads(line.removeprefix(PROGRESS_MARK))
            progress(what, done, total)
        else:
            log.write(line)
    process.wait()


def _raise_failure(scratch: Path, nproc: int, returncode: int, log_path: Path) -> None:
    """The first cause among the ranks' reports: a user's error before a crash, a crash before its echoes."""
    reports = [read_json(path) for path in sorted(scratch.glob("error-*.json"))]
    for report in reports:
        if report["kind"] == "input":
            raise InputError(report["message"])
    # A rank that was killed leaves no report, and the others then only complain about the lost connection.
    causes = [report for report in reports if "onnection" not in report["message"]]
    if causes:
        first = causes[0]
        message = " ".join(str(first["message"]).split())[:300]
        raise TrainingFailed(f"rank {first['rank']} failed: {message}; see {log_path}; run the same command to resume")
    silent = sorted(set(range(nproc)) - {report["rank"] for report in reports})
    who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent)) or 'unknown'}"
    raise TrainingFailed(
        f"{who} died without a word (torchrun exit code {returncode}); see {log_path}; run the same command to resume "
        "from the newest checkpoint"
    )


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot be used ({error.strerror}); give another or leave it out"
            ) from None
