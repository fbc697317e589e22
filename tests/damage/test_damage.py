"""No damage to any file of any artifact goes unnoticed or ends in a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.damage.campaign import run_campaign
from tests.damage.workspace import Workspace

SLOW = ("train", "train from", "resume", "export", "export measured", "serve", "cluster", "tune", "prepare")
SLOW += ("predict exported",)
PROGRAMMES = ("train 2 ranks", "run")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    built = Workspace(tmp_path_factory.mktemp("damage"))
    built.build()
    return built


def check(work: Workspace, num_damages: int, *, seed: int, commands: list[str]) -> None:
    cases = list(run_campaign(work, num_damages, seed=seed, commands=commands))
    assert not [case for case in cases if not case.is_fine]
    assert sum(case.outcome == "refused" for case in cases) > num_damages // 2


def test_damage_is_refused_in_one_sentence_or_changes_nothing(work: Workspace) -> None:
    check(work, 50, seed=1, commands=[name for name in work.commands if name not in (*SLOW, *PROGRAMMES)])
    check(work, 10, seed=2, commands=list(SLOW))


@pytest.mark.slow
def test_five_hundred_damages_are_refused_or_change_nothing(work: Workspace) -> None:
    check(work, 500, seed=3, commands=list(work.commands))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_made_up_artifacts_are_refused_or_taken_but_crash_nothing() -> None:
    """In a process of its own: every case is a fork of it."""
    command = [sys.executable, "-m", "tests.damage.hostile", "--cases", "100", "--seed", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
