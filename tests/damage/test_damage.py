"""No damage to any file of any artifact goes unnoticed or ends in a traceback."""

from __future__ import annotations

import pytest

from tests.damage.campaign import run_campaign
from tests.damage.workspace import Workspace

SLOW = ("train", "resume", "export", "serve", "cluster")


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
    check(work, 50, seed=1, commands=[name for name in work.commands if name not in SLOW])
    check(work, 10, seed=2, commands=list(SLOW))


@pytest.mark.slow
def test_five_hundred_damages_are_refused_or_change_nothing(work: Workspace) -> None:
    check(work, 500, seed=3, commands=list(work.commands))
