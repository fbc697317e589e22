"""The first screen of a run with a baseline: both side by side, and one row per switch in plain words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from recmill.artifacts import read_json
from recmill.report import build_report
from recmill.report.gains import (
    auc_error,
    figures_table,
    find_trainings,
    gains_lede,
    gains_lines,
    shared_table,
    switches_table,
)
from recmill.report.page import page_sections
from recmill.report.runs import Run, load_run
from recmill.training.switches import Switch
from tests.unit.report.report_runs import write_json, write_run

DECISIONS = {
    "dedup": {"is_on": True, "reason": "the lists of 4 features repeat", "ratio": 1.42, "source": "trial"},
    "tiers": {"is_on": False, "reason": "0.93x in a trial of 32 steps", "ratio": 0.93, "source": "trial"},
    "hot_batches": {"is_on": False, "reason": "turned off by the setting", "ratio": None, "source": "setting"},
    "sharing": {"is_on": False, "reason": "you turn it on", "ratio": None, "source": "setting"},
    "tuning": {"is_on": True, "reason": "worker counts follow the load", "ratio": None, "source": "data"},
}


def write_variant(path: Path, *, seconds_per_part: float, **options: Any) -> None:
    """A run folder whose result also has times of evaluations, usage and decisions."""
    write_run(path, **options)
    result = read_json(path / "train/result.json")
    for part, entry in enumerate(result["evaluations"], start=1):
        entry["seconds"] = part * seconds_per_part
    settings = {"dedup": "auto", "tiers": "auto", "hot_batches": "false", "sharing": "auto", "tuning": "auto"}
    result["decisions"] = [{"switch": name, "setting": settings[name], **DECISIONS[name]} for name in DECISIONS]
    result["usage"] = {"num_samples": 360_000, "wire_bytes": 36e6 * seconds_per_part, "cpu_seconds": 90.0}
    result["metrics"]["base_rate"] = 0.2
    write_json(path / "train/result.json", result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gains") / "run"
    write_variant(path, speed=2.0, auc=0.7934, seconds_per_part=1.0, data_bytes=10_000_000)
    write_variant(path / "baseline", speed=1.0, auc=0.7934, seconds_per_part=2.0, data_bytes=30_000_000)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return load_run(folder)


def cells(table: Any) -> dict[str, list[str]]:
    return {
        row[0].text: [f"{cell.text} {cell.change}".strip().replace("\u00a0", " ") for cell in row[1:]]
        for row in table.rows
    }


def test_a_run_without_a_baseline_has_no_such_section(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "alone")
    alone = load_run(tmp_path / "alone")
    assert find_trainings(alone) is None
    assert page_sections([alone])[0].id == "pipeline"
    assert page_sections([run], trainings=find_trainings(run))[0].id == "gains"


def test_figures_stand_beside_those_of_the_baseline(run: Run) -> None:
    trainings = find_trainings(run)
    assert trainings is not None
    found = cells(figures_table(trainings))
    assert found["Samples per second"] == ["8 k", "16 k 2.00×"]
    # Evaluations are 0.16 e^-part below the last AUC: the fifth is the first within 0.002.
    assert found["Time to the baseline's AUC"] == ["10 s", "5 s 2.00×"]
    assert found["Data on disk"] == ["28.6 MiB", "9.54 MiB 3.00×"]
    assert found["Sent between processes, per sample"] == ["200 B", "100 B 2.00×"]
    assert found["CPU seconds per million samples"] == ["250", "250 1.00×"]
    assert found["AUC, held-out data"][1].startswith("0.7934 ± 0.00")


def test_the_standard_error_is_the_measured_one_or_hanleys() -> None:
    auc, positives, negatives = 0.7934, 8_000, 32_000
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    by_hand = math.sqrt(
        (auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2)) / positives / negatives
    )
    metrics = {"auc": auc, "base_rate": 0.2, "num_samples": 40_000}
    assert auc_error(Run(path="", label="", parts={"training": {"metrics": metrics}})) == pytest.approx(by_hand)
    measured = metrics | {"standard_errors": {"auc": 0.0123}}
    assert auc_error(Run(path="", label="", parts={"training": {"metrics": measured}})) == 0.0123


def test_every_switch_has_a_row_that_says_what_it_gained_or_why_it_is_off(run: Run) -> None:
    trainings = find_trainings(run)
    assert trainings is not None
    rows = [[cell.text or cell.change for cell in row] for row in switches_table(trainings).rows]
    told = {str(switch): row[1:] for switch, row in zip(Switch, rows, strict=True)}
    assert told["dedup"] == ["on", "1.42× samples/s in a trial on this data. The lists of 4 features repeat."]
    assert told["tiers"] == ["off", "Off, because it does not pay on this data: 0.93x in a trial of 32 steps."]
    assert told["hot_batches"] == ["off", "Off: turned off by the setting."]
    assert told["sharing"] == ["off", "Off: you turn it on."]
    assert told["tuning"][1].startswith("Training waited for data 4% of the time (baseline: 4%).")


def test_the_lede_names_speed_and_both_aucs(run: Run) -> None:
    trainings = find_trainings(run)
    assert trainings is not None
    told = gains_lede(trainings)
    assert told.startswith("2.00× the baseline's samples per second; AUC 0.7934 ± 0.00")
    assert told.endswith("; 2 of 5 optimisations on.")


def test_a_variant_with_shared_parameters_gets_a_column_and_its_own_words(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    write_variant(copy / "shared", speed=1.5, auc=0.7834, seconds_per_part=1.5)
    trainings = find_trainings(load_run(copy))
    assert trainings is not None
    assert trainings.shared is not None
    assert cells(shared_table(trainings, trainings.shared))["Samples per second"] == ["8 k", "12 k 1.50×"]
    assert gains_lines(trainings)[0].endswith(" Shared parameters")
    sharing = switches_table(trainings).rows[list(Switch).index(Switch.SHARING)]
    assert sharing[1].change == "variant"
    assert "AUC 0.7834 (−0.0100 against the baseline)." in sharing[2].text
    page = build_report([copy], out=tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index('id="gains"') < page.index('id="pipeline"') < page.index('class="cards')
    assert "shared parameters" in page
