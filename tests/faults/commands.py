"""The commands that the campaign disturbs: small inputs, and what makes two results equal."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recmill.artifacts import (
    AccessProfile,
    Artifact,
    Checkpoint,
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    read_checked_json,
)
from recmill.serving.server.environment import server_python
from tests.faults.processes import ROOT, Command

TRAINING = {
    "batch_size": 64,
    "max_steps": 8,
    "checkpoint_every": 2,
    "bottom_layers": 8,
    "top_layers": 8,
    "threads": 1,
    "trial": "false",
}


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
            kills=8,
        ),
        Command(
            name="generate",
            arguments=("generate", "--preset", "tiny", "--sessions", "150", "--out", "OUT"),
            result=files_hash("*.parquet"),
            kills=7,
        ),
        Command(name="cluster", arguments=(*cluster, "--out", "OUT"), result=content_hash(Dataset), kills=8),
        Command(
            name="profile",
            arguments=("profile", data, "--out", "OUT"),
            result=content_hash(AccessProfile),
            kills=7,
        ),
        Command(
            name="plan",
            arguments=("plan", path("profile"), "--nproc", "2", "--hot-budget", "64KB", "--out", "OUT"),
            result=content_hash(ShardPlan),
            kills=7,
        ),
        Command(
            name="layout",
            arguments=("layout", data, "--plan", path("plan1"), "--out", "OUT"),
            result=content_hash(Dataset),
            kills=5,
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
    if not why_left_out("serve"):
        found.append(serve_command(base / "served"))
    return {command.name: command for command in found}


def serve_command(models: Path) -> Command:
    """`recmill serve` does not end by itself: the command is a caller, and faults are about the server it starts."""
    if not models.exists():
        write = f"import pathlib, tests.faults.serve_case as case; case.write_models(pathlib.Path({str(models)!r}))"
        subprocess.run([sys.executable, "-c", write], check=True, cwd=ROOT)
    return Command(
        name="serve",
        arguments=(str(models),),
        result=lambda _, said: json.loads(said),
        kills=8,
        forks=False,
        module="tests.faults.serve_case",
        own=1,
    )


def why_left_out(name: str) -> str:
    """Why a command cannot be disturbed on this machine, or ""."""
    if name == "serve":
        try:
            server_python()
        except InputError as error:
            return str(error)
    return ""
