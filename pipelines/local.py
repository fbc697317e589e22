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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from recmill.artifacts import InputError, held_folder

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

    def describe_failure(self, kfp_message: str) -> str:
        """Which step failed and why, in one line. kfp's message ends with the task's name between colour codes."""
        named = [step for step in self.steps if f"'{step.replace('_', '-')}'" in kfp_message]
        reason = self.failure or self.exception or "it was killed or exited without a message"
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
) -> None:
    """Run a pipeline on this machine; InputError or StepFailed if one of its steps fails."""
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
            raise StepFailed(log.describe_failure(str(error))) from error
        finally:
            builtins.print = original_print  # ParallelFor leaves its indenting print behind
            config.LocalExecutionConfig.instance = None  # or later calls of a component would run it


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
