"""docs/following.md shows what `recmill submit --wait` prints, letter by letter, from answers as servers give them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines.commands import submit
from pipelines.server import following
from tests.pipelines.cluster_answers import cluster_with, killed_pod, unschedulable_pod
from tests.pipelines.kubeflow_answers import WORKFLOW, KubeflowServer, look, serving, step

PAGE = Path(__file__).parents[2] / "docs" / "following.md"
HOST = "http://localhost:8080"
# A run: step, seconds since the start of the run at which it begins and ends, and its last line.
STEPS = (
    ("open_run", 21, 25, ""),
    ("generate_data", 38, 59, "5,400 rows/s, 1.2 MiB"),
    ("profile_access", 71, 77, "92,000 rows/s, 310.4 KiB"),
    ("tune_ingest", 72, 86, "41,200 rows/s"),
    ("plan_shards", 88, 91, "24.8 KiB"),
    ("train_baseline", 104, 126, "21,300 samples/s, AUC 0.7391, 2.1 MiB"),
    ("train_model", 139, 165, "38,700 samples/s, AUC 0.7391, 2.1 MiB"),
    ("report", 178, 183, "1.4 MiB"),
    ("close_run", 196, 199, ""),
)
LOGS = {
    name: f"[{name}] started\n[{name}] done in {ended - began - 3}.2 s{': ' + said if said else ''}\n"
    for name, began, ended, said in STEPS
}
REFUSED = (
    "[generate_data] started\n[generate_data] error: /runs/nowhere: no such file or folder; expected a Parquet file, a "
    "folder of Parquet files with a schema.json, or a log.yaml\n"
)
NAMES = [name for name, *_ in STEPS]


def done(*names: str) -> list[Any]:
    return [
        entry
        for name, began, ended, _ in STEPS
        if name in names
        for entry in step(name.replace("_", "-"), "SUCCEEDED", began, ended, pod=name)
    ]


def cached(*names: str) -> list[Any]:
    return [
        entry
        for name, began, _, _ in STEPS
        if name in names
        for entry in step(name.replace("_", "-"), "SUCCEEDED", began, began + 2, work="SKIPPED")
    ]


def going(name: str, state: str = "RUNNING", **how: Any) -> list[Any]:
    began = next(began for step_name, began, _, _ in STEPS if step_name == name)
    return step(name.replace("_", "-"), state, began, pod=name, **how)


def failing(name: str, seconds: int) -> list[Any]:
    began = next(began for step_name, began, _, _ in STEPS if step_name == name)
    return step(name.replace("_", "-"), "FAILED", began, began + seconds, pod=name)


def looks_at(case: str) -> list[dict[str, Any]]:
    before = NAMES[: NAMES.index("train_model")]
    match case:
        case "success":
            parts = [(done(*NAMES[:place]), going(name)) for place, name in enumerate(NAMES)]
            return [*(look("RUNNING", *part) for part in parts), look("SUCCEEDED", done(*NAMES))]
        case "cached":
            skipped = NAMES[1 : NAMES.index("report")]
            return [look("SUCCEEDED", done("open_run", "report", "close_run"), cached(*skipped))]
        case "failed":
            return [
                look("RUNNING", done("open_run"), going("generate_data")),
                look("FAILED", done("open_run"), failing("generate_data", 9), done("close_run")),
            ]
        case "unschedulable":
            waiting = look("RUNNING", done("open_run"), going("generate_data", work="PENDING"))
            return [waiting] * 8 + [look("RUNNING", done("open_run"), done("generate_data")), look("SUCCEEDED")]
        case "out of memory":
            return [
                look("RUNNING", done(*before), going("train_model")),
                look("FAILED", done(*before), failing("train_model", 17), done("close_run")),
            ]
        case "interrupted":
            return [look("RUNNING", done(*before), going("train_model"))] * 3
    raise AssertionError(case)


def printed(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both streams of `recmill submit --wait` as a terminal shows them; the server's address and times are replaced."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(following, "WAITING_S", 0.02 if case == "unschedulable" else 60.0)
    pods = {
        "unschedulable": [unschedulable_pod(f"{WORKFLOW}-800487865")],
        "out of memory": [killed_pod(f"{WORKFLOW}-9")],
    }
    logs = dict(LOGS)
    if case == "failed":
        logs["generate_data"] = REFUSED
    if case == "out of memory":
        logs["train_model"] = "[train_model] started\n"
    server = KubeflowServer(looks_at(case), logs)
    with serving(server), cluster_with(pods.get(case, []), folder) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        if case == "interrupted":
            monkeypatch.setattr(following.time, "sleep", lambda seconds: press_ctrl_c())
        flags = ["--host", server.url, "--wait", "--poll-interval", "0.01"]
        outcome = CliRunner().invoke(submit, flags)
    said = outcome.output.replace(server.url, HOST)
    ending = {0: "", 1: "(exit code 1)\n", 130: "(exit code 130)\n"}[outcome.exit_code]
    clock = iter(f"03:{second // 60:02d}:{second % 60:02d}  " for second in range(25, 1000, 7))
    return re.sub(r"(?m)^\d\d:\d\d:\d\d  ", lambda found: next(clock), said) + ending


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def shown(case: str) -> str:
    """What the page shows below the heading of the case."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {case.capitalize()}\n")[1]
    return section.split("```\n")[1]


@pytest.mark.parametrize("case", ["success", "cached", "failed", "unschedulable", "out of memory", "interrupted"])
def test_the_page_shows_what_is_printed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(case, tmp_path, monkeypatch) == shown(case)
