"""One small folder of every kind, and the commands that read them, run in this process: a case takes a second or so.

python -m tests.damage.workspace FOLDER    # only writes the folders
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from recmill.artifacts import InputError, WorkerAllocation, read_checked_json
from recmill.artifacts.places.failures import describe_failure
from recmill.cli import main
from recmill.report.runs import load_run
from recmill.serving.model import RequestModel
from recmill.serving.server.versions import blank_request
from recmill.training.config import TrainConfig
from recmill.training.verdicts import Verdicts, remember, remembered
from tests.event_logs import Options, Shop
from tests.unit.report.report_runs import write_run

ROOT = Path(__file__).parents[2]
CONFIG = {
    "batch_size": 64,
    "max_steps": 6,
    "checkpoint_every": 2,
    "bottom_layers": [8],
    "top_layers": [8],
    "threads": 1,
    "hot_batches": "true",
    "tiers": "false",
    "dedup": "auto",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended: what it gave, or the sentence it ended with."""

    code: int
    result: Any = None
    said: str = ""


class Workspace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def build(self) -> None:
        """All folders, as the commands write them."""
        cluster = ["cluster", self.path("raw"), "--eval-fraction", "0.2", "--layout"]
        for command in (
            ["generate", "--preset", "tiny", "--sessions", "150", "--out", self.path("raw")],
            [*cluster, "deduplicated", "--out", self.path("dataset")],
            [*cluster, "session", "--out", self.path("sessions")],
            ["profile", self.path("dataset"), "--out", self.path("profile")],
            ["plan", self.path("profile"), "--nproc", "1", "--hot-budget", "8KB", "--out", self.path("plan")],
            ["plan", self.path("profile"), "--nproc", "2", "--hot-budget", "8KB", "--out", self.path("plan2")],
            ["tune", self.path("dataset"), "--seconds", "0.5", "--out", self.path("allocation")],
            ["prepare", str(Shop.random(3, 60).write(self.folder / "shop", Options())), "--out", self.path("prepared")],
        ):
            ended = run_command([*command, "--json"])
            assert ended.code == 0, (command, ended.said)
        stop = mock.patch("recmill.training.rank.loop.TrainingRun._finish", side_effect=KeyboardInterrupt)
        with stop, contextlib.suppress(KeyboardInterrupt):
            self._train(self.folder / "stopped")
        # As if a trial had measured something: its verdicts are kept beside the plan.
        job = read_checked_json(self.folder / "stopped" / "job.json")
        found = remembered(job, num_ranks=1)
        remember(job, replace(found or Verdicts(), seconds=1.0), num_ranks=1)
        shutil.copytree(self.folder / "stopped", self.folder / "run")
        self._train(self.folder / "run")
        assert run_command(["export", self.path("run/checkpoint"), "--out", self.path("model"), "--json"]).code == 0
        shutil.rmtree(self.folder / "model" / "mlflow")
        assert run_command([*self._predict("run/checkpoint"), "--out", self.path("scores"), "--json"]).code == 0
        run_module("tests.old_checkpoints", self.path("old"))
        write_run(self.folder / "report")

    def _train(self, out: Path, *, start_from: str | None = None) -> dict[str, Any]:
        from recmill.training.trainer import train

        return train(
            self.path("dataset"),
            out=out,
            plan=self.path("plan"),
            allocation=self.path("allocation"),
            start_from=start_from,
            config=TrainConfig.from_json({**TrainConfig().to_json(), **CONFIG}),
            launcher=_launch_here,
        )

    @cached_property
    def commands(self) -> Mapping[str, tuple[tuple[str, ...], Callable[[], Ended]]]:
        """By name: the folders that a command reads, and the command."""
        out = str(self.scratch / "out")

        def artifact(kind: str, *arguments: str) -> Callable[[], Ended]:
            def run() -> Ended:
                ended = run_command([*arguments, "--out", out, "--json"])
                if ended.code:
                    return ended
                return Ended(0, json.loads(Path(out, f"{kind}.json").read_text())["content_hash"])

            return run

        data, plan, model = self.path("dataset"), self.path("plan"), self.path("run/checkpoint")
        cluster = ("cluster", self.path("raw"), "--layout", "session")
        return {
            "cluster": (("raw",), artifact("dataset", *cluster)),
            "profile": (("dataset",), artifact("profile", "profile", data)),
            "profile sessions": (("sessions",), artifact("profile", "profile", self.path("sessions"))),
            "plan": (("profile",), artifact("plan", "plan", self.path("profile"), "--nproc", "2")),
            "plan again": (
                ("profile", "plan2"),
                artifact("plan", "plan", self.path("profile"), "--nproc", "2", "--from", self.path("plan2")),
            ),
            "layout": (("dataset", "plan"), artifact("dataset", "layout", data, "--plan", plan)),
            "evaluate": (("run/checkpoint", "dataset"), lambda: run_command(["evaluate", model, data, "--json"])),
            "export": (("run/checkpoint",), self._export),
            "export measured": (("run/checkpoint", "dataset", "profile"), self._export_measured),
            "convert": (("old",), artifact("checkpoint", "convert-checkpoint", self.path("old"))),
            "serve": (("model",), self._serve),
            "serve requests": (("model/request",), self._serve_requests),
            "tune": (("dataset",), self._tune),
            "predict": (("run/checkpoint", "dataset"), lambda: self._score(*self._predict("run/checkpoint"))),
            "predict exported": (("model", "dataset"), lambda: self._score(*self._predict("model"))),
            "predict again": (("scores",), self._predict_again),
            "prepare": (("prepared/vocabulary",), self._prepare),
            "compare": (("report",), self._compare),
            "train": (("dataset", "plan", "plan.trials", "allocation"), self._train_anew),
            "train from": (("run/checkpoint",), self._train_from),
            "resume": (("stopped",), self._resume),
            "result": (("run",), self._show_result),
            "train 2 ranks": (("dataset", "plan2"), self._train_on_two_ranks),
            "run": (("raw",), self._run),
        }

    def all_files(self, name: str) -> list[Path]:
        return sorted(path for path in (self.folder / name).rglob("*") if path.is_file())

    def files(self, name: str) -> list[Path]:
        """The files of a folder that a command reads. A raw log's schema is written by people and has no hash."""
        files = self.all_files(name)
        unread = {"train.log", ".lock"} | ({"schema.json"} if name == "raw" else set())
        files = [path for path in files if path.name not in unread]
        return [path for path in files if path.name in ("result.json", "job.json")] if name == "run" else files

    def _export(self) -> Ended:
        ended = run_command(["export", self.path("run/checkpoint"), "--out", str(self.scratch / "out"), "--json"])
        if ended.code:
            return ended
        with zipfile.ZipFile(self.scratch / "out" / "model.pt2") as archive:
            weights = [archive.read(name) for name in sorted(archive.namelist()) if "/weights/weight_" in name]
        return Ended(0, hashlib.sha256(b"".join(weights)).hexdigest())

    def _export_measured(self) -> Ended:
        command = ["export", self.path("run/checkpoint"), "--out", str(self.scratch / "out"), "--no-program"]
        ended = run_command([*command, "--profile", self.path("profile"), "--data", self.path("dataset"), "--json"])
        return ended if ended.code else Ended(0, ended.result["request"])

    def _serve(self) -> Ended:
        """Load the exported model as MLflow does, and predict."""
        import pandas as pd

        from recmill.tracking.pyfunc import RankingProgram

        program = RankingProgram()
        places = {"program": self.path("model/model.pt2"), "signature": self.path("model/signature.json")}
        try:
            program.load_context(SimpleNamespace(artifacts=places))
        except (ValueError, OSError) as error:  # the server that loads it says so
            return Ended(2, said=str(error))
        names = [*program.signature["dense"], *(entry["name"] for entry in program.signature["ids"])]
        rows = pd.DataFrame({name: [0, 1] for name in names})
        return Ended(0, program.predict(None, rows).tolist())

    def _serve_requests(self) -> Ended:
        """Load the exported model as the server does, and score."""
        model = RequestModel.load(self.path("model"))
        return Ended(0, model.score(blank_request(model.signature, 3)).tolist())

    def _tune(self) -> Ended:
        """What is measured differs every time; that there is an allocation does not."""
        out = self.scratch / "out"
        ended = run_command(["tune", self.path("dataset"), "--seconds", "0.2", "--out", str(out), "--json"])
        return ended if ended.code else Ended(0, sorted(WorkerAllocation.load(out, verify=True).stages))

    def _predict(self, model: str) -> list[str]:
        return ["predict", self.path(model), self.path("dataset"), "--rows-per-part", "200"]

    def _score(self, *command: str) -> Ended:
        return self._files(command, "part-*.parquet")

    def _predict_again(self) -> Ended:
        shutil.copytree(self.folder / "scores", self.scratch / "out")
        return self._score(*self._predict("run/checkpoint"))

    def _prepare(self) -> Ended:
        command = ("prepare", self.path("shop/log.yaml"), "--vocabulary", self.path("prepared"))
        return self._files(command, "**/*.parquet")

    def _files(self, command: Sequence[str], pattern: str) -> Ended:
        ended = run_command([*command, "--out", str(self.scratch / "out"), "--json"])
        files = sorted((self.scratch / "out").glob(pattern))
        return ended if ended.code else Ended(0, [hashlib.sha256(path.read_bytes()).hexdigest() for path in files])

    def _train_on_two_ranks(self) -> Ended:
        out = self.scratch / "out"
        command = ["train", self.path("dataset"), "--plan", self.path("plan2"), "--nproc", "2", "--out", str(out)]
        ended = run_programme([*command, *(f"--set={name}={_text(value)}" for name, value in CONFIG.items())])
        return ended if ended.code else Ended(0, _losses(read_checked_json(out / "result.json")))

    def _run(self) -> Ended:
        out = self.scratch / "out"
        command = ["run", "--data", self.path("raw"), "--no-baseline", "--no-tracking", "--nproc", "1"]
        command += ["--out", str(out)]
        ended = run_programme([*command, *(f"--set={name}={_text(value)}" for name, value in CONFIG.items())])
        return ended if ended.code else Ended(0, _losses(read_checked_json(out / "train" / "result.json")))

    def _compare(self) -> Ended:
        page = self.scratch / "page.html"
        ended = run_command(["compare", self.path("report"), "--out", str(page), "--json"])
        if ended.code:
            return ended
        run = load_run(self.path("report"))  # what the page is made of; the page itself has the time on it
        return Ended(2, said=run.missing[0]) if run.missing else Ended(0, (run.parts, run.steps))

    def _train_anew(self) -> Ended:
        return Ended(0, _losses(self._train(self.scratch / "out")))

    def _train_from(self) -> Ended:
        return Ended(0, _losses(self._train(self.scratch / "out", start_from=self.path("run/checkpoint"))))

    def _resume(self) -> Ended:
        shutil.copytree(self.folder / "stopped", self.scratch / "out")
        return Ended(0, _losses(self._train(self.scratch / "out")))

    def _show_result(self) -> Ended:
        return Ended(0, _losses(self._train(self.folder / "run")))

    def run(self, name: str) -> Ended:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        return _explain(self.commands[name][1])


def run_command(arguments: list[str]) -> Ended:
    """A command of the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, json.loads(out.getvalue()) if code == 0 else None, err.getvalue().strip())


def run_programme(arguments: list[str]) -> Ended:
    """A command that starts processes, in one of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "recmill", *arguments, "--json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("recmill: error:") or "Traceback" in line]
    return Ended(ran.returncode, said="\n".join(lines) or ran.stderr[-2000:])


def run_module(*arguments: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-m", *arguments], check=True, cwd=ROOT)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _explain(call: Callable[[], Ended]) -> Ended:
    try:
        return call()
    except InputError as error:
        return Ended(2, said=f"recmill: error: {error}")
    except Exception as error:
        if (reason := describe_failure(error)) is None:
            raise
        return Ended(2, said=f"recmill: error: {reason}")


def _losses(result: Mapping[str, Any]) -> Any:
    return [[entry["step"], entry["loss"]] for entry in result["curve"]], result["metrics"]["auc"]


def _launch_here(job: Mapping[str, Any], folder: Path, nproc: int) -> None:
    """The only rank of a run, in this process."""
    from recmill.training.rank.worker import run_rank

    rank = _environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with rank, contextlib.redirect_stdout(io.StringIO()):
        run_rank(dict(job))


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        values["MASTER_PORT"] = str(probe.getsockname()[1])
    with mock.patch.dict(os.environ, values):
        yield


if __name__ == "__main__":
    Workspace(Path(sys.argv[1])).build()
