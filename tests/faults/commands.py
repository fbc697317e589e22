"""The commands that the campaign disturbs: small inputs, and what makes two results equal.

A command runs in a folder of its own, with its output, its temporary folder and its home in it, so that everything it
leaves behind is seen. Most run as forks of one process that has loaded what they import: a case takes a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from recmill.artifacts import (
    AccessProfile,
    Artifact,
    Checkpoint,
    Dataset,
    ShardPlan,
    WorkerAllocation,
    read_checked_json,
)

TRAINING = {
    "batch_size": 64,
    "max_steps": 8,
    "checkpoint_every": 2,
    "bottom_layers": 8,
    "top_layers": 8,
    "threads": 1,
    "trial": "false",
}
MARK = "RECMILL_FAULT_CASE"  # in the environment of every process of a case
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments with OUT for the output; `result` gives what must be equal after every fault."""

    name: str
    arguments: tuple[str, ...]
    result: Callable[[str, str], Any]  # (output, standard output)
    kills: int  # of 100 over all commands
    forks: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def settings(**changes: Any) -> list[str]:
    return [f"--set={name}={value}" for name, value in {**TRAINING, **changes}.items()]


def content_hash(kind: type[Artifact]) -> Callable[[str, str], Any]:
    return lambda out, _: kind.load(out, verify=True).content_hash


def trained(out: str, _: str = "") -> Any:
    result = read_checked_json(f"{out}/result.json", kind="training")
    model = Checkpoint.load(f"{out}/checkpoint", verify=True)
    tensors = [entry.sha256 for entry in model.files if entry.name.endswith(".safetensors")]
    return [[entry["step"], entry["loss"]] for entry in result["curve"]], result["metrics"], tensors


def exported(out: str, _: str) -> Any:
    with zipfile.ZipFile(Path(out, "model.pt2")) as archive:
        weights = [archive.read(name) for name in sorted(archive.namelist()) if "/weights/weight_" in name]
    return hashlib.sha256(b"".join(weights)).hexdigest(), read_checked_json(f"{out}/signature.json")["ids"]


def files_hash(pattern: str) -> Callable[[str, str], Any]:
    def result(out: str, _: str) -> Any:
        files = sorted(Path(out).glob(pattern))
        assert files
        return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]

    return result


def is_whole_page(out: str, _: str) -> Any:
    """A page has the time in it: it is whole, not equal."""
    return Path(out).read_text(encoding="utf-8").rstrip().endswith("</html>")


def is_allocation(out: str, _: str) -> Any:
    """An allocation holds what was measured: it is whole, not equal."""
    return sorted(WorkerAllocation.load(out, verify=True).stages)


def make_inputs(base: Path) -> dict[str, Command]:
    """Write the inputs of all commands below `base`, and return the commands by name."""
    from tests.event_logs import Options, Shop
    from tests.unit.report.report_runs import write_run

    base.mkdir(parents=True, exist_ok=True)
    log = Shop.random(3, 60).write(base / "shop", Options()) if not (base / "shop").exists() else base / "shop/log.yaml"
    path = lambda name: str(base / name)  # noqa: E731
    cluster = ["cluster", path("raw"), "--eval-fraction", "0.2", "--layout", "deduplicated"]
    for command in (
        ["generate", "--preset", "tiny", "--sessions", "150", "--out", path("raw")],
        [*cluster, "--out", path("dataset")],
        ["profile", path("dataset"), "--out", path("profile")],
        ["plan", path("profile"), "--nproc", "1", "--hot-budget", "64KB", "--out", path("plan1")],
        ["plan", path("profile"), "--nproc", "2", "--hot-budget", "64KB", "--out", path("plan2")],
        ["train", path("dataset"), "--out", path("trained"), *settings()],
    ):
        if not Path(command[command.index("--out") + 1]).exists():
            subprocess.run([sys.executable, "-m", "recmill", *command, "--json"], check=True, stdout=subprocess.DEVNULL)
    write_run(base / "report")
    if not (base / "old").exists():
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.old_checkpoints", path("old")], check=True, cwd=ROOT
        )
    model, data = path("trained/checkpoint"), path("dataset")
    run_settings = [f"--set={name}={value}" for name, value in {**TRAINING, "data.sessions": 120}.items()]
    hot = settings(hot_batches="true", tiers="false")
    found = [
        Command(
            name="init",
            arguments=("init", str(log.parent), "--force", "--out", "OUT"),
            result=lambda out, _: Path(out).read_text(encoding="utf-8").replace(out, "OUT"),
            kills=4,
        ),
        Command(
            name="prepare",
            arguments=("prepare", str(log), "--out", "OUT"),
            result=files_hash("log-*.parquet"),
            kills=10,
        ),
        Command(
            name="generate",
            arguments=("generate", "--preset", "tiny", "--sessions", "150", "--out", "OUT"),
            result=files_hash("*.parquet"),
            kills=8,
        ),
        Command(name="cluster", arguments=(*cluster, "--out", "OUT"), result=content_hash(Dataset), kills=10),
        Command(
            name="profile",
            arguments=("profile", data, "--out", "OUT"),
            result=content_hash(AccessProfile),
            kills=8,
        ),
        Command(
            name="plan",
            arguments=("plan", path("profile"), "--nproc", "2", "--hot-budget", "64KB", "--out", "OUT"),
            result=content_hash(ShardPlan),
            kills=8,
        ),
        Command(
            name="layout",
            arguments=("layout", data, "--plan", path("plan1"), "--out", "OUT"),
            result=content_hash(Dataset),
            kills=6,
        ),
        Command(
            name="tune",
            arguments=("tune", data, "--seconds", "0.5", "--out", "OUT"),
            result=is_allocation,
            kills=5,
        ),
        Command(
            name="train",
            arguments=("train", data, "--out", "OUT", *settings()),
            result=trained,
            kills=7,
            forks=False,
        ),
        Command(
            name="train 2 ranks",
            arguments=("train", data, "--plan", path("plan2"), "--nproc", "2", "--out", "OUT", *hot),
            result=trained,
            kills=10,
            forks=False,
            environment={"GLOO_SOCKET_IFNAME": "lo"},
        ),
        Command(
            name="evaluate",
            arguments=("evaluate", model, data),
            result=lambda _, said: json.loads(said)["metrics"],
            kills=6,
        ),
        Command(
            name="predict",
            arguments=("predict", model, data, "--rows-per-part", "200", "--out", "OUT"),
            result=files_hash("part-*.parquet"),
            kills=6,
        ),
        Command(name="export", arguments=("export", model, "--out", "OUT"), result=exported, kills=3),
        Command(
            name="convert-checkpoint",
            arguments=("convert-checkpoint", path("old"), "--out", "OUT"),
            result=content_hash(Checkpoint),
            kills=2,
        ),
        Command(
            name="compare",
            arguments=("compare", path("report"), "--out", "OUT"),
            result=is_whole_page,
            kills=4,
        ),
        Command(
            name="run",
            arguments=("run", "--preset", "tiny", "--no-baseline", "--nproc", "1", "--out", "OUT", *run_settings),
            result=lambda out, _: trained(f"{out}/train")[0],
            kills=3,
            forks=False,
        ),
    ]
    return {command.name: command for command in found}


@dataclass(kw_only=True)
class Process:
    """A command that was started."""

    pid: int
    folder: Path
    mark: str
    started: float = field(default_factory=time.monotonic)
    status: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.status

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def said(self, name: str = "stderr") -> str:
        return output_file(self.folder, name).read_text(errors="replace")


def output_file(folder: Path, name: str) -> Path:
    """What a command prints, beside its folder, which may be full or read-only."""
    return folder.with_name(f"{folder.name}.{name}")


def load_everything() -> None:
    """What forked commands import."""
    import recmill.cli.data
    import recmill.cli.generate
    import recmill.cli.init
    import recmill.cli.layout
    import recmill.cli.planning
    import recmill.cli.report
    import recmill.cli.training
    import recmill.cli.tuning
    import recmill.data.cluster.duckdb_engine
    import recmill.data.preparation.prepared_log
    import recmill.planning.planner
    import recmill.profiling.access
    import recmill.training.prediction.predictor
    import recmill.training.rank.worker
    import recmill.training.serving
    import recmill.training.tensors.conversion
    import recmill.tuning.allocation
    import recmill.tuning.conversion  # noqa: F401


def start(
    command: Command,
    folder: Path,
    *,
    out: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    before: Callable[[], None] = lambda: None,
    more: Sequence[str] = (),
) -> Process:
    """Start a command in the folder of a case; with a `prefix` (ip netns exec ...) as a programme of its own.

    `before` is called in the new process.
    """
    with contextlib.suppress(OSError):  # read-only
        (folder / "tmp").mkdir(exist_ok=True, parents=True)
    arguments = [part.replace("OUT", out or str(folder / "out")) for part in (*command.arguments, *more)]
    mark = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    added = {
        MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "RECMILL_TRACKING": "off",
        "PYTHONPATH": str(ROOT),
        "RECMILL_STORE_ATTEMPTS": "3",
        **command.environment,
        **(environment or {}),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("stdout", "stderr"):  # before it can be killed
        output_file(folder, name).write_bytes(b"")
    is_forked = command.forks and not prefix and "LD_PRELOAD" not in added
    pid = os.fork()
    if pid:
        return Process(pid=pid, folder=folder, mark=mark)
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name, number in (("stdout", 1), ("stderr", 2)):
            descriptor = os.open(output_file(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(added)
        before()
        if not is_forked:
            os.execvp((line := [*prefix, sys.executable, "-m", "recmill", *arguments, "--json"])[0], line)
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from recmill.cli import main

        main([*arguments, "--json"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: what an interpreter would print
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(Exception):
        import logging

        logging.shutdown()
    os._exit(code)


def survivors(process: Process) -> list[psutil.Process]:
    """Processes of a case that still run: by the environment they were started with, or the session they are in."""
    found = []
    for other in psutil.process_iter(["pid"]):
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = os.getsid(other.pid) == process.pid or other.environ().get(MARK) == process.mark
            if is_ours and other.status() != psutil.STATUS_ZOMBIE:
                found.append(other)
    return found
