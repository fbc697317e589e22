import json
from pathlib import Path

from recmill.artifacts import dump_record
from recmill.cli.quality import quality_lines
from recmill.report.quality import quality_section
from recmill.report.runs import load_runs
from recmill.training.metrics.catalogue import headline_numbers
from tests.unit.report.report_runs import quality, write_run


def test_every_metric_has_its_error_and_meaning(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    table, chart, slices = quality_section(load_runs([tmp_path / "run"])).blocks
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["GAUC"] == ["0.6842", "0.0034", "AUC within each group, weighted by its samples"]
    assert rows["NDCG@10"][:2] == ["0.5123", "0.0045"]
    assert rows["Calibration"][0] == "1.0321"
    assert "3,000 users, of which 250 have one class only" in table.note
    assert "4,300 sessions with a positive of 5,000" in table.note
    assert str(chart.svg).count("<circle") == 20
    assert [row[0].text for row in slices.rows][:3] == ["new user_id", "rare user_id", "frequent user_id"]
    assert [row[1].text for row in slices.rows][:3] == ["never", "1–36", "37+"]
    assert slices.rows[0][3].text == "0.7100 ± 0.0110"


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    write_run(tmp_path / "one", auc=0.75)
    write_run(tmp_path / "two", auc=0.76)
    table = quality_section(load_runs([tmp_path / "one", tmp_path / "two"])).blocks[0]
    assert [cell.text for cell in table.rows[0][:3]] == ["AUC", "0.7500 ± 0.0021", "0.7600 ± 0.0021"]


def test_a_run_from_before_these_metrics_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "train" / "result.json"
    result = json.loads(path.read_text())
    result["metrics"] = {"auc": 0.7, "log_loss": 0.4}
    path.write_text(dump_record(result))
    assert [block.text for block in quality_section(load_runs([tmp_path / "run"])).blocks] == [
        "run has no detailed metrics."
    ]


def test_the_terminal_shows_metrics_and_slices() -> None:
    metrics = {"auc": 0.7934, "log_loss": 0.4412, "num_samples": 40_000, "base_rate": 0.25, **quality()}
    lines = quality_lines("test", metrics)
    assert lines[0] == "test: 40,000 samples, base rate 0.2500"
    assert any(line.startswith("AUC                    0.7934     0.0021   chance that") for line in lines)
    assert any(
        line.startswith("new user_id             1,000   0.7100     0.0110    0.5000     0.0120") for line in lines
    )
    assert lines[-1] == "GAUC: 3,000 users, 250 of one class left out"


def test_several_labels_have_a_table_each_in_their_order(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "train" / "result.json"
    result = json.loads(path.read_text())
    click, buy = {**result["metrics"], "auc": 0.7}, {**result["metrics"], "auc": 0.8}
    result["metrics"] = {**click, "tasks": {"buy": buy, "click": click}, "labels": ["click", "buy"]}
    path.write_text(dump_record(result))
    blocks = quality_section(load_runs([tmp_path / "run"])).blocks
    assert [block.text for block in blocks if block.kind == "heading"] == ["Label: click", "Label: buy"]
    tables = [block for block in blocks if block.kind == "table" and block.title == "Metrics"]
    assert [table.rows[0][1].text for table in tables] == ["0.7000", "0.8000"]
    metrics = {**result["metrics"], "base_rate": 0.2}
    for own in metrics["tasks"].values():
        own["base_rate"] = 0.2
    titles = [line for line in quality_lines("test", metrics) if line.startswith("test")]
    assert titles == ["test, click: 40,000 samples, base rate 0.2000", "test, buy: 40,000 samples, base rate 0.2000"]
    assert headline_numbers(metrics)["auc"] == 0.7
    assert headline_numbers(metrics)["buy_auc"] == 0.8
