"""Faults of every kind, a few of each: `make test-faults` runs the campaign."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.campaign import draw_cases, judge, table
from tests.faults.commands import why_left_out
from tests.faults.faults import FAULTS, Baseline
from tests.faults.processes import Command, Process, output_file

BASELINE = Baseline(result=[1], seconds=1.0, changes=1, disk_bytes=1, memory_bytes=1)
COMMAND = Command(name="give", arguments=(), result=lambda out, said: [int(said)], kills=100)


@pytest.mark.parametrize(
    ("code", "out", "err", "outcome"),
    [
        (0, "1", "", "right result"),
        (0, "2", "", "another result"),
        (0, "x", "", "exit 0, but ValueError: invalid literal for int() with base 10: 'x'"),
        (2, "", "recmill: error: s3://a: cannot be read\n", "one sentence"),
        (2, "", "recmill: error: one\nrecmill: error: two\n", "exit 2"),
        (1, "", "Traceback (most recent call last):\nrecmill: error: one\n", "exit 1"),
        (-9, "", "", "killed"),
        (-11, "", "", "exit -11"),
        (None, "", "", "hangs"),
    ],
)
def test_outcomes_are_told_apart(tmp_path: Path, code: int | None, out: str, err: str, outcome: str) -> None:
    folder = tmp_path / "case"
    output_file(folder, "stdout").write_text(out)
    output_file(folder, "stderr").write_text(err)
    process = Process(pid=0, folder=folder, mark="", status=code)
    assert judge(process, COMMAND, BASELINE, "")[0] == outcome


def test_equal_seeds_draw_equal_cases_over_all_commands() -> None:
    names = ("cluster", "train", "train 2 ranks", "run")
    commands = {name: Command(name=name, arguments=(), result=COMMAND.result, kills=25) for name in names}
    counts = dict.fromkeys(FAULTS, 20)
    cases = draw_cases(commands, counts, seed=3)
    assert cases == draw_cases(commands, counts, seed=3) != draw_cases(commands, counts, seed=4)
    assert {case.command for case in cases if case.fault == "kill"} == set(names)
    assert {case.command for case in cases if case.fault == "network lost"} == {"train 2 ranks"}
    assert "skipped: no root" in table([], {"kill": "no root"})[-1]


def test_a_caller_of_the_campaign_is_no_target(tmp_path: Path) -> None:
    line = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    caller = subprocess.Popen([sys.executable, "-c", line])
    process = Process(pid=caller.pid, folder=tmp_path, mark="", own=1)
    while not (targets := process.targets()):
        time.sleep(0.01)
    assert [own.pid for own in process.family()] == [caller.pid, targets[0].pid]
    targets[0].kill()
    caller.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [random.Random(5).randrange(1000), 11])
def test_commands_survive_faults(tmp_path: Path, seed: int) -> None:
    """In a process of its own: commands are forks of it, and forks of a test runner have its threads' locks."""
    kinds = ["kill", "stop", "disk full", "read-only disk", "memory limit"]
    names = ["prepare", "generate", "cluster", "profile", "plan", "evaluate", "predict", "train 2 ranks"]
    command = [sys.executable, "-m", "tests.faults.campaign", "--faults", "20", "--seed", str(seed)]
    command += ["--json", str(tmp_path / "faults.json"), "--kinds", *kinds, "--commands", *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_left_out("serve") != "", reason=why_left_out("serve"))
def test_a_server_survives_faults(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.campaign", "--faults", "5", "--seed", "2", "--commands", "serve"]
    command += ["--json", str(tmp_path / "faults.json"), "--kinds", "kill", "memory limit"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_changing_limits_lose_and_repeat_no_row(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from pathlib import Path; from tests.faults.soak import soak; import json, sys; "]
    command[-1] += f"found = soak(Path({str(tmp_path)!r}), minutes=2, seed=1); print(json.dumps(found)); "
    command[-1] += "sys.exit(found['wrong_epochs'] != 0 or found['whole_epochs'] == 0)"
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
