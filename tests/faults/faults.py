"""Faults: what happens to a command while it runs, and what is needed to make it happen."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.machine import control_group, memory_controller, mounted, run_tool
from tests.faults.processes import Process

NETWORK_LOSS_S = 30
STOPPED_LIMIT_S = 40  # the limit for stopped processes, which is 600 s by default
MISSED = "it had ended"


@dataclass(kw_only=True)
class Baseline:
    """An undisturbed run: its result, and how long, how many changes of files, how many bytes it took.

    `at` is the change at which a disk fails; 0: any, and any time.
    """

    result: object
    seconds: float
    changes: int
    disk_bytes: int
    memory_bytes: int
    at: int = 0


@dataclass(kw_only=True)
class Setting:
    """How a command is started under a fault, and what is done to it. `heal` makes the machine well again."""

    disturb: Callable[[Process], str] = lambda process: ""
    heal: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    before: Callable[[], None] = lambda: None
    arguments: Sequence[str] = ()
    out: str = ""


def signature(folder: Path) -> tuple[frozenset[str], int]:
    """Names and bytes of everything below a folder."""
    names, total = [], 0
    for root, folders, files in os.walk(folder):
        names += [os.path.join(root, name) for name in (*folders, *files)]
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return frozenset(names), total


def wait_for_moment(process: Process, baseline: Baseline, draw: random.Random) -> str:
    """Wait for a random time, or for a random change among the files; says which it was."""
    if not baseline.at and (draw.random() < 0.4 or not baseline.changes):
        moment = draw.uniform(0, baseline.seconds)
        process.wait(max(0.0, process.started + moment - time.monotonic()))
        return f"after {moment:.2f} s"
    count, seen, last = baseline.at or draw.randint(1, baseline.changes), 0, signature(process.folder)[0]
    deadline = time.monotonic() + 3 * baseline.seconds + 30
    while process.poll() is None and time.monotonic() < deadline:
        now = signature(process.folder)[0]
        if now != last:
            last, seen = now, seen + 1
            if seen >= count:
                break
        time.sleep(0.002)
    time.sleep(0 if baseline.at else draw.choice([0, 0, 0.003, 0.02]))
    return f"at change {count} of files"


def strike(
    process: Process, baseline: Baseline, draw: random.Random, act: Callable[[psutil.Process], None], *, first: int = 0
) -> str:
    """Do something to a random process of the command, from its `first` on, at a random moment; says to which."""
    when = wait_for_moment(process, baseline, draw)
    deadline = time.monotonic() + 3 * baseline.seconds + 30
    while not (family := process.targets()[first:]) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if not family:
        return f"{when}: {MISSED}"
    number = draw.randrange(len(family))
    with contextlib.suppress(psutil.NoSuchProcess):
        act(family[number])
    return f"{when}: process {first + number + 1} of {first + len(family)}"


@contextmanager
def kill(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    yield Setting(disturb=lambda process: strike(process, baseline, draw, psutil.Process.kill))


@contextmanager
def stop(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """SIGSTOP a process for a while."""
    seconds = draw.uniform(0.2, 4)

    def pause(chosen: psutil.Process) -> None:
        chosen.suspend()
        time.sleep(seconds)
        chosen.resume()

    yield Setting(disturb=lambda process: f"{seconds:.1f} s, {strike(process, baseline, draw, pause)}")


@contextmanager
def stop_for_good(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """SIGSTOP a process below the command's own and leave it so."""
    yield Setting(
        disturb=lambda process: strike(process, baseline, draw, psutil.Process.suspend, first=1),
        arguments=[f"--set=timeout_s={STOPPED_LIMIT_S}"],
    )


@contextmanager
def full_disk(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """Output and temporary files on a file system that is too small."""
    share = (baseline.at - 0.5) / baseline.changes if baseline.at else draw.uniform(0.02, 0.98)
    size = max(32 * 1024, int(baseline.disk_bytes * share))
    with mounted(folder, f"size={size // 4096 * 4096}"):
        yield Setting(
            disturb=lambda _: f"{size:,} of {baseline.disk_bytes:,} bytes",
            heal=lambda: run_tool("mount", "-o", "remount,size=4g", str(folder)),
        )


@contextmanager
def read_only_disk(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """A file system that becomes read-only."""

    def disturb(process: Process) -> str:
        when = wait_for_moment(process, baseline, draw)
        while process.poll() is None:  # refused while a file is open for writing
            if subprocess.run(["mount", "-o", "remount,ro", str(folder)], capture_output=True).returncode == 0:
                return when
            time.sleep(0.001)
        return f"{when}: {MISSED}"

    with mounted(folder, "size=4g"):
        yield Setting(disturb=disturb, heal=lambda: run_tool("mount", "-o", "remount,rw", str(folder)))


@contextmanager
def little_memory(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """A control group that allows less memory than the command needs."""
    limit = int(baseline.memory_bytes * draw.uniform(0.3, 0.9))
    with control_group(f"recmill-faults-{os.getpid()}-{folder.name}", limit) as join:
        yield Setting(disturb=lambda _: f"{limit:,} of {baseline.memory_bytes:,} bytes", before=join)


@contextmanager
def clock_jump(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """The wall clock jumps; the monotonic clock and waits for a time span do not, as on a real machine.

    By a library of our own: after a jump by libfaketime, sleeping fails with EINVAL, which no machine does.
    """
    clock, library = folder.with_name(f"{folder.name}.clock"), folder.with_name(f"{folder.name}.so")
    clock.write_bytes(bytes(8))
    run_tool("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(Path(__file__).with_name("clock.c")), "-ldl")
    name, seconds = draw.choice([("+1 h", 3600), ("-1 h", -3600), ("+400 d", 400 * 86400), ("-400 d", -400 * 86400)])

    def disturb(process: Process) -> str:
        when = wait_for_moment(process, baseline, draw)
        with open(clock, "r+b") as file:  # processes have it mapped
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))
        return f"{when}: {name}"

    try:
        yield Setting(disturb=disturb, environment={"LD_PRELOAD": str(library), "RECMILL_CLOCK": str(clock)})
    finally:
        clock.unlink()
        library.unlink()


@contextmanager
def lost_network(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """Ranks in a network namespace whose interface is down for 30 s."""
    name = f"recmill-{os.getpid()}-{draw.randrange(10**6)}"
    run_tool("ip", "netns", "add", name)
    try:
        run_tool("ip", "-n", name, "link", "set", "lo", "up")

        def disturb(process: Process) -> str:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if any((folder / "out" / "checkpoints").glob("step-*")):
                    break
                time.sleep(0.005)
            run_tool("ip", "-n", name, "link", "set", "lo", "down")
            time.sleep(NETWORK_LOSS_S)
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            return f"{NETWORK_LOSS_S} s, after the first checkpoint"

        yield Setting(disturb=disturb, prefix=["ip", "netns", "exec", name])
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def failing_store(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """An S3 server that answers late, with errors and with half of the bytes, and may be away for a while."""
    import s3fs

    from tests.faults.store import serve_apart

    kind = draw.choice(["errors", "slow", "short reads", "away"])
    with serve_apart(folder.with_name(f"{folder.name}.port"), kind=kind, seed=draw.randrange(10**6)) as address:
        environment = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        os.environ.update(environment)  # results are read in this process
        s3fs.S3FileSystem.clear_instance_cache()
        _say(address, "begin")

        def disturb(process: Process) -> str:
            if kind == "away":
                process.wait(draw.uniform(0, baseline.seconds))
                _say(address, "leave")
            return kind

        yield Setting(
            disturb=disturb,
            heal=lambda: _say(address, "end"),
            environment=environment,
            out=f"s3://faults/{folder.name}",
        )


@contextmanager
def lost_database(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """MLflow's database is replaced by something else, or cannot be opened, in the middle of a run."""

    def disturb(process: Process) -> str:
        when = wait_for_moment(process, baseline, draw)
        database = folder / "mlflow.db"
        if draw.random() < 0.5:
            database.unlink(missing_ok=True)
            return f"{when}: deleted"
        with contextlib.suppress(OSError):
            database.write_bytes(b"not a database" * 1000)
        return f"{when}: overwritten"

    yield Setting(
        disturb=disturb,
        heal=lambda: [path.unlink() for path in folder.glob("mlflow.db*")] and None,
        environment={"RECMILL_TRACKING": "on"},
    )


@contextmanager
def lost_tracking_server(folder: Path, baseline: Baseline, draw: random.Random) -> Iterator[Setting]:
    """An MLflow server that is killed in the middle of a run."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = folder.with_name(f"{folder.name}.mlflow")
    place.mkdir(exist_ok=True)
    command = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, *command, "--workers", "1", "--artifacts-destination", str(place)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # type: ignore[call-overload]
    )
    address = f"http://127.0.0.1:{port}"

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    def disturb(process: Process) -> str:
        when = wait_for_moment(process, baseline, draw)
        end()
        return when

    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=1):
                break
            time.sleep(0.1)
        # By default MLflow's client tries for four minutes, call by call.
        patience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
        yield Setting(
            disturb=disturb, environment={"RECMILL_TRACKING": "on", "MLFLOW_TRACKING_URI": address, **patience}
        )
    finally:
        end()


FAULTS = {
    "kill": kill,
    "stop": stop,
    "stop for good": stop_for_good,
    "disk full": full_disk,
    "read-only disk": read_only_disk,
    "memory limit": little_memory,
    "clock jump": clock_jump,
    "network lost": lost_network,
    "object store": failing_store,
    "MLflow database": lost_database,
    "MLflow server": lost_tracking_server,
}
# Commands that a fault is about, where it is not about all of them.
ONLY = {
    "stop for good": ("train", "train 2 ranks", "run"),  # those that wait for processes
    "network lost": ("train 2 ranks",),
    "object store": ("cluster", "profile", "plan", "train"),
    "MLflow database": ("run",),
    "MLflow server": ("run",),
}


def obstacle(fault: str) -> str:
    """Why a fault cannot be made on this machine, or ""."""
    if fault in ("disk full", "read-only disk", "memory limit", "network lost") and os.getuid() != 0:
        return "needs root"
    if fault == "clock jump" and not shutil.which("cc"):
        return "needs a C compiler"
    if fault == "network lost" and not shutil.which("ip"):
        return "needs ip (iproute2)"
    if fault == "memory limit" and not memory_controller():
        return "needs a writable memory controller in /sys/fs/cgroup"
    return ""


def _say(address: str, what: str) -> None:
    with urllib.request.urlopen(f"{address}/-/{what}", timeout=20):
        pass
