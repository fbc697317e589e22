"""Run the pipeline on this machine through kfp's local runner, and follow its steps.

kfp prints the steps' output to standard output, between its own lines. All of it goes to a log file; the steps' own
lines (`[step] text`, see recmill.tracking) are also passed to a follower.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from recmill.artifacts import (
    InputError,
    explain_write_errors,
    held_folder,
    is_remote,
    join_path,
    path_exists,
    read_checked_json,
    refuse_foreign_folder,
)
from recmill.artifacts.places.stores import list_names, remove_file, upload_file

LOG, RECORD = "run.log", "run.json"  # in the folder of a run
Follow = Callable[[str, str], None]  # step, text of its line
SAYING = re.compile(r"\[(?P<step>[a-z_]+)\] (?P<text>.*)")  # a line of a step, also in the log of its pod
EXCEPTION = re.compile(r"[A-Za-z_.]+(Error|Exception)(:|$)")
STOP_S = 10.0  # grace period of interrupted steps


class StepFailed(RuntimeError):
    """A step crashed; the message is one line with the step and the reason."""


class StepLog(io.TextIOBase):
    """A text stream that writes to a log file, passes the steps' own lines on and keeps the first failure."""

    def __init__(self, file: TextIO, *, steps: tuple[str, ...], follow: Follow) -> None:
        self.file, self.steps, self.follow = file, steps, follow
        self.partial = ""
        self.input_error = ""
        self.failure = ""
        self.exception = ""  # the last line of a traceback, for a step that failed before it started

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.file.write(text)
        *lines, self.partial = (self.partial + text).split("\n")
        for line in lines:
            self._read(line.strip())
        return len(text)

    def flush(self) -> None:
        self.file.flush()

    def describe_failure(self, kfp_message: str, causes: Sequence[str] = ()) -> str:
        """Which step failed and why, in one line. kfp's message ends with the task's name between colour codes."""
        named = [step for step in self.steps if f"'{step.replace('_', '-')}'" in kfp_message]
        reason = self.failure or "; ".join(causes) or self.exception or "it was killed or exited without a message"
        return f"step {named[-1] if named else 'unknown'} failed: {reason}"

    def _read(self, line: str) -> None:
        if EXCEPTION.match(line):
            self.exception = line
        match = SAYING.fullmatch(line)
        if not match or match["step"] not in self.steps:
            return
        text = match["text"]
        if text.startswith("error: ") and not self.input_error:
            self.input_error = text.removeprefix("error: ")
        elif text.startswith("failed: ") and not self.failure:
            self.failure = text.removeprefix("failed: ")
        self.follow(match["step"], text)


def run_locally(
    pipeline: Any,
    arguments: Mapping[str, Any],
    *,
    steps: tuple[str, ...],
    log_path: str | Path,
    environment: Mapping[str, str],
    follow: Follow,
    causes: Sequence[str] = (),
) -> None:
    """Run a pipeline on this machine; InputError or StepFailed if one of its steps fails.

    `causes`, which may grow meanwhile, is why a step was killed.
    """
    from kfp import local
    from kfp.local import config

    with (
        held_folder(purpose="kfp") as scratch,
        open(log_path, "w", encoding="utf-8") as file,
        changed_environment(environment),
        steps_stopped_by_sigterm(),
        loops_with_outputs(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # that our image is not called python
        # Both folders are temporary: kfp deletes workspace_root after every run.
        root, workspace = scratch / "root", scratch / "workspace"
        workspace.mkdir()
        log = StepLog(file, steps=steps, follow=follow)
        original_print = builtins.print
        try:
            with redirect_stdout(log):
                local.init(
                    local.SubprocessRunner(use_venv=False), pipeline_root=str(root), workspace_root=str(workspace)
                )
                pipeline(**arguments)
        except RuntimeError as error:
            if log.input_error:
                raise InputError(log.input_error) from None
            raise StepFailed(log.describe_failure(str(error), causes)) from error
        finally:
            builtins.print = original_print  # ParallelFor leaves its indenting print behind
            config.LocalExecutionConfig.instance = None  # or later calls of a component would run it


def beside_database(workdir: str) -> str:
    """The folder beside which MLflow's database is by default: for a URL, as for a run of that name in runs/."""
    if not is_remote(workdir):
        return workdir
    folder = Path("runs").absolute()
    folder.mkdir(exist_ok=True)
    return str(folder / workdir.rstrip("/").rsplit("/", 1)[-1])


@contextmanager
def log_of(workdir: str) -> Iterator[Path]:
    """The path of the log; that of a run at a URL is on this machine until the block ends."""
    if not is_remote(workdir):
        yield Path(workdir, LOG)
        return
    with held_folder(purpose="run") as scratch:
        try:
            yield scratch / LOG
        finally:
            if (scratch / LOG).exists():
                upload_file(scratch / LOG, join_path(workdir, LOG))


def prepare_folder(arguments: Mapping[str, Any]) -> None:
    """Make the run's folder and remove the step records of an earlier run."""
    workdir = arguments["workdir"]
    if workdir.startswith("memory://"):
        raise InputError(f"--out {workdir}: needs a folder or a store, because steps share no memory")
    refuse_foreign_folder(workdir, RECORD)
    refuse_other_arguments(workdir, arguments)
    with explain_write_errors(workdir):
        if not is_remote(workdir):
            Path(workdir).mkdir(parents=True, exist_ok=True)
        steps = join_path(workdir, "steps")
        for name in list_names(steps):
            if name.endswith(".json"):
                remove_file(join_path(steps, name))


def refuse_other_arguments(folder: str, arguments: Mapping[str, Any]) -> None:
    """Raise if the folder holds a model trained with other arguments; the same arguments resume the run."""
    if not path_exists(join_path(folder, "train")):
        return
    before = read_checked_json(join_path(folder, RECORD)).get("arguments", {})
    differing = [name for name in arguments if before.get(name) != arguments[name]]
    if differing:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is {arguments[name]!r}" for name in differing)
        raise InputError(f"{folder}: holds another run ({changes}); give another --out or remove it")


@contextmanager
def loops_with_outputs() -> Iterator[None]:
    """Tasks in a loop get outputs of tasks outside of it; kfp 2.17's local runner gives them the loop's item."""
    from kfp.local.orchestrator import task_spec_utils

    name = "create_parameter_loop_iteration_task_spec"
    create = getattr(task_spec_utils, name)

    def create_with_outputs(task: Any, item: Any, loop: str) -> Any:
        made = create(task, item, loop)
        for key, given in task.inputs.parameters.items():
            if given.HasField("task_output_parameter"):
                made.inputs.parameters[key].CopyFrom(given)
        return made

    setattr(task_spec_utils, name, create_with_outputs)
    try:
        yield
    finally:
        setattr(task_spec_utils, name, create)


@contextmanager
def steps_stopped_by_sigterm() -> Iterator[None]:
    """Hand SIGTERM on to the steps as the interrupt that Ctrl-C is, and wait for them: orphans would go on."""
    earlier = set(psutil.Process().children(recursive=True))
    told: set[psutil.Process] = set()

    def stop(number: int, frame: FrameType | None) -> None:
        told.update(set(psutil.Process().children(recursive=True)) - earlier)
        for child in told:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for child in psutil.wait_procs(told, timeout=STOP_S)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(told, timeout=STOP_S)


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables set, for the steps that inherit it; as it was afterwards."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
