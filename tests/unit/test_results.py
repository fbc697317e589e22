"""The results tables: current, complete, honest about age and noise, and every ratio names its rival."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402 - a folder of scripts, not a package
import measured_code  # noqa: E402
import parts  # noqa: E402
import results  # noqa: E402
from claims import CLAIMS, Claim  # noqa: E402
from result_rows import Row, read_rows  # noqa: E402

CLAIM = Claim(text="speed", rival="slow", metric="speed", target=2.0)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(read_rows())


def make_row(claim: Claim, low: float, high: float, *, pairs: int = 9, quick: bool = False, **more: Any) -> Row:
    metric = {"ours": low, "ratio": low, "pairs": pairs, "is_exact": False, "unit": ""}
    metric |= {"spread": {"interval": [low, high]}, **more}
    result = {"metrics": {"speed": metric}, "skipped": {}, "quick": quick}
    return Row(claim=claim, benchmark="b", result=result)


def test_the_pages_hold_the_tables_of_the_latest_results(rows: list[Row]) -> None:
    for page, content in ((results.README, results.make_headlines(rows)), (results.PAGE, results.make_table(rows))):
        assert results.update(page, content) == page.read_text(encoding="utf-8"), "run python benchmarks/results.py"


def test_the_readme_shows_no_stale_row_as_if_it_were_current(rows: list[Row]) -> None:
    text = results.README.read_text(encoding="utf-8")
    table = text.partition(results.BEGIN)[2].partition(results.END)[0]
    shown = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines() if "|" in line}
    for row in rows:
        if row.claim.is_headline:
            (verdict,) = [cells[3] for cells in shown if (cells[0], cells[2]) == (row.claim.text, row.claim.rival)]
            assert (verdict == "**stale**") == (row.is_stale and not row.why_skipped)


def test_every_measured_row_has_its_commit_date_and_machine(rows: list[Row]) -> None:
    header, _, *lines = results.make_table(rows).splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert {"rival", "interval", "verdict", "pairs", "commit", "date", "machine"} <= set(columns)
    for line in lines:
        cells = dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        if cells["verdict"] != "skipped":
            assert re.fullmatch(r"[0-9a-f]{10}", cells["commit"])
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", cells["date"])
            assert re.fullmatch(r".+, \d+ cores", cells["machine"])


def test_every_ratio_names_its_rival_and_the_readme_has_eight() -> None:
    claims = [claim for group in CLAIMS.values() for claim in group]
    assert all(claim.rival for claim in claims if not claim.is_value or claim.is_headline)
    assert sum(claim.is_headline for claim in claims) == 8


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(2.0, 2.4, "met"), (1.9, 2.4, "open"), (1.7, 1.99, "missed")],
)
def test_a_target_is_met_by_the_bad_end_of_the_interval(low: float, high: float, verdict: str) -> None:
    assert make_row(CLAIM, low, high).verdict == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.9, 0.5, "met"), (-1.2, 0.5, "open"), (-2.0, -1.1, "missed"), (1.1, 2.0, "missed")],
)
def test_an_absolute_value_must_lie_below_its_target_at_both_ends(low: float, high: float, verdict: str) -> None:
    claim = replace(CLAIM, target=1.0, is_below=True, is_value=True)
    assert make_row(claim, low, high).verdict == verdict


def test_few_pairs_and_quick_forms_are_never_met() -> None:
    assert make_row(CLAIM, 2.5, 2.6, pairs=8).verdict == "open"
    assert make_row(CLAIM, 2.5, 2.6, quick=True).verdict == "open"
    assert make_row(CLAIM, 1.5, 1.6, pairs=3).verdict == "missed"
    assert make_row(CLAIM, 2.5, 2.5, pairs=1, is_exact=True).verdict == "met"


def test_one_run_makes_no_row_and_changed_code_makes_it_stale() -> None:
    alone = make_row(CLAIM, 2.5, 2.5, pairs=1, spread={"interval": None})
    assert (alone.verdict, alone.measured) == ("skipped", "only one run")
    assert replace(make_row(CLAIM, 2.5, 2.6), changed=("kernels",)).verdict == "stale"
    assert Row(claim=CLAIM, benchmark="b", result={}).verdict == "skipped"


def test_the_hash_of_code_changes_with_code_and_not_with_comments(tmp_path: Path) -> None:
    texts = ('"""Old."""\nx = {1, 2}  # one\n', '"""New."""\n\nx = {1, 2}\n', "x = 2\n")
    found = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}" / "a.py"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        found.append(measured_code.code_of(path))
    assert found[0] == found[1] != found[2]


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    good = "import sys\nopen(sys.argv[2], 'w').write('{}')\n"
    (tmp_path / "good.py").write_text(good, encoding="utf-8")
    failed = results.run_benchmarks(["bad", "good"], tmp_path / "out", is_quick=False, scripts=tmp_path)
    assert failed == ["bad"]
    assert (tmp_path / "out" / "good.json").exists()
    assert "bad failed with exit code 3" in capfd.readouterr().out


def options_of(tmp_path: Path) -> harness.Options:
    path = str(tmp_path / "made.json")
    return harness.Options(benchmark="made", quick=True, tiny=True, json_path=path, seed=0)


def found(value: float) -> parts.Found:
    metric = harness.plain_value([value, value], unit="s")
    return parts.Found(metrics={f"m{value:g}": metric}, extra={"series": {f"{value:g}": [value]}})


def test_parts_resume_after_a_failure_and_are_removed_when_all_succeeded(tmp_path: Path) -> None:
    calls = []

    def fail() -> parts.Found:
        raise ValueError("broken")

    def once() -> parts.Found:
        calls.append(1)
        return found(1.0)

    options = options_of(tmp_path)
    first = parts.Parts(options)
    first.measure("one", once)
    first.measure("two", fail)
    first.measure("three", lambda: found(3.0))
    with pytest.raises(SystemExit, match="failed: two"):
        first.finish()
    result = json.loads(Path(tmp_path / "made.json").read_text(encoding="utf-8"))
    assert set(result["metrics"]) == {"m1", "m3"}
    assert result["failed"] == {"two": "ValueError: broken"}
    row = Row(claim=replace(CLAIM, metric="m2"), benchmark="made", result=result)
    assert (row.verdict, row.measured) == ("skipped", "two failed: ValueError: broken")
    second = parts.Parts(options)
    second.measure("one", once)
    second.measure("two", lambda: found(2.0))
    second.measure("three", fail)  # kept: not called again
    second.finish()
    result = json.loads(Path(tmp_path / "made.json").read_text(encoding="utf-8"))
    assert set(result["metrics"]) == {"m1", "m2", "m3"}
    assert result["series"] == {"1": [1.0], "2": [2.0], "3": [3.0]}
    assert calls == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["made.json"]


def test_parts_that_were_not_chosen_are_not_measured_yet(tmp_path: Path) -> None:
    chosen = parts.Parts(replace(options_of(tmp_path), only=("one",)))
    chosen.measure("one", lambda: found(1.0))
    chosen.measure("two", lambda: found(2.0))
    chosen.finish()
    result = json.loads(Path(tmp_path / "made.json").read_text(encoding="utf-8"))
    assert (set(result["metrics"]), result["left_out"]) == ({"m1"}, ["two"])
    assert Row(claim=replace(CLAIM, metric="m2"), benchmark="made", result=result).measured == "not measured yet"
    assert "one" in parts.Parts(options_of(tmp_path))  # the next call continues


def test_parts_of_another_seed_are_measured_again(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    parts.Parts(options).measure("one", lambda: found(1.0))
    assert "one" in parts.Parts(options)
    assert "one" not in parts.Parts(replace(options, seed=1))


def test_every_benchmark_names_code_that_exists() -> None:
    assert set(measured_code.CODE) == set(CLAIMS)
    for code in measured_code.CODE.values():
        assert all(measured_code.files_of(part) for part in code)
    stored = measured_code.hash_code("pss")
    assert measured_code.changed_code("pss", stored) == []
    assert measured_code.changed_code("pss", {**stored, "benchmarks/pss*.py": "0"}) == ["benchmarks/pss*.py"]
    assert measured_code.changed_code("pss", None) == list(stored)
