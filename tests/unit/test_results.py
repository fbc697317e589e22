"""The results tables: current, complete, and every ratio names its rival."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_pages_hold_the_tables_of_the_latest_results(results: ModuleType) -> None:
    for page, content in ((results.README, results.make_headlines()), (results.PAGE, results.make_table())):
        assert results.update(page, content) == page.read_text(encoding="utf-8"), "run python benchmarks/results.py"


def test_every_row_has_its_commit_date_and_machine(results: ModuleType) -> None:
    header, _, *lines = results.make_table().splitlines()
    assert header.endswith("| benchmark | commit | date | machine |")
    for line in lines:
        commit, date, machine = (cell.strip() for cell in line.strip("|").split("|")[-3:])
        assert re.fullmatch(r"[0-9a-f]{10}", commit)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert re.fullmatch(r".+, \d+ cores", machine)


def test_every_ratio_names_its_rival_and_the_readme_has_eight(results: ModuleType) -> None:
    claims = [claim for group in results.CLAIMS.values() for claim in group]
    assert all(claim.rival for claim in claims if not claim.is_value or claim.reference)
    assert sum(claim.is_headline for claim in claims) == 8


def test_a_missed_target_is_marked(results: ModuleType) -> None:
    ratio = {"ours": 2.0, "ratio": 2.0, "spread": {}, "unit": ""}
    result = {"metrics": {"speed": ratio, "full": {**ratio, "ours": 2.5}}, "skipped": {}}
    claim = results.Claim(text="speed", rival="slow", metric="speed", target=2.0)
    row = results.Row(claim=claim, benchmark="b", result=result)
    assert not row.is_missed
    assert replace(row, claim=replace(claim, target=2.1)).is_missed
    assert replace(row, claim=replace(claim, target=1.9, is_below=True, is_value=True)).is_missed
    assert replace(row, claim=replace(claim, target=0.4, is_value=True, reference="full")).is_missed
    assert not replace(row, claim=replace(claim, target=0.6, is_value=True, reference="full")).is_missed
