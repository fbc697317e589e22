import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli import main
from recmill.cli.report import compare
from recmill.report.comparison import ComparedFigure, Figure, compare_runs, comparison_json
from recmill.report.runs import Run, load_run, load_runs
from recmill.report.units import format_number
from tests.unit.report.report_runs import write_json


def measured(value: float | None, baseline: float | None, **options: bool) -> ComparedFigure:
    figure = Figure(key="k", title="t", unit="", read=lambda run: None, format=format_number, **options)
    return ComparedFigure(figure=figure, value=value, baseline=baseline)


def test_a_ratio_above_one_is_better_whichever_way_the_figure_runs() -> None:
    assert measured(20, 10, more_is_better=True).ratio == 2
    assert measured(5, 10, more_is_better=False).ratio == 2
    assert measured(10, 5, more_is_better=False).ratio == 0.5


@pytest.mark.parametrize(("value", "baseline"), [(None, 1.0), (1.0, None), (1.0, 0.0)])
def test_what_was_not_measured_has_no_ratio(value: float | None, baseline: float | None) -> None:
    cell = measured(value, baseline, more_is_better=True)
    assert cell.ratio is None
    assert cell.change == ""
    assert cell.tone == ""


def test_quality_is_compared_by_difference() -> None:
    better = measured(0.7950, 0.7934, more_is_better=True, by_difference=True)
    assert better.change == "+0.0016"
    worse = measured(0.7900, 0.7934, more_is_better=True, by_difference=True)
    assert worse.change == "−0.0034"
    assert measured(0.79341, 0.7934, more_is_better=True, by_difference=True).change == "same"


def test_only_changes_larger_than_noise_are_called_good_or_bad() -> None:
    assert [measured(value, 100, more_is_better=True).tone for value in (150, 101, 99, 60)] == ["good", "", "", "bad"]


def test_every_figure_of_two_runs_is_compared(baseline: Path, faster: Path) -> None:
    table = {row[0].figure.key: row for row in compare_runs(load_runs([baseline, faster]))}
    assert table["samples_per_s"][1].ratio == pytest.approx(2.0)
    assert table["data_bytes"][1].ratio == pytest.approx(4.0)
    assert table["bytes_per_sample"][0].value == pytest.approx(38_400_000 / 400_000)
    assert table["auc"][1].difference == pytest.approx(0.0016)
    assert table["log_loss"][1].ratio == 1
    assert table["train_model_seconds"][1].ratio == pytest.approx(2.0)
    assert table["generate_data_seconds"][1].ratio == 1
    assert [row[0].ratio for row in table.values()] == [1] * len(table)


def test_a_figure_that_one_run_lacks_stays_in_the_table(baseline: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"format_version": 1, "kind": "run", "name": "bare", "seconds": 10.0})
    compared = comparison_json(load_runs([baseline, tmp_path]))
    assert compared["runs"][1]["figures"]["auc"] is None
    assert compared["runs"][1]["ratios"]["auc"] is None
    assert compared["runs"][1]["ratios"]["total_seconds"] == pytest.approx((84.5 + 6.5) / 10)
    json.dumps(compared, allow_nan=False)


def test_a_number_that_is_not_finite_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/result.json").write_text('{"format_version": 1, "samples_per_s": NaN}')
    with pytest.raises(InputError, match=r"result\.json: not valid JSON \(NaN"):
        load_run(tmp_path)


def test_runs_with_one_name_are_told_apart(baseline: Path, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        write_json(tmp_path / folder / "run.json", {"format_version": 1, "name": "demo"})
    assert [run.label for run in load_runs([tmp_path / "first", tmp_path / "second"])] == ["first", "second"]
    assert [run.label for run in load_runs([baseline, baseline])] == ["baseline (1)", "baseline (2)"]


def test_the_output_folder_of_train_is_a_run_too(baseline: Path) -> None:
    run = load_run(baseline / "train")
    assert run.number("training", "metrics", "auc") == 0.7934
    assert "dataset/dataset.json is missing" in run.missing[1]


def test_steps_are_in_the_order_of_the_pipeline(baseline: Path) -> None:
    assert list(load_run(baseline).steps) == [
        "generate_data",
        "profile_access",
        "plan_shards",
        "tune_ingest",
        "train_model",
    ]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: no such folder"):
        load_run(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a run folder: it contains none of run\.json"):
        load_run(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="is a file; expected a run folder"):
        load_run(tmp_path / "run.json")


def test_a_broken_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/profile.json").write_text('{"format_version": 1, "tab')
    with pytest.raises(InputError, match=r"profile/profile\.json: not valid JSON"):
        load_run(tmp_path)


def test_a_part_of_another_version_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"format_version": 2})
    with pytest.raises(InputError, match=r"run\.json: format_version is 2, this recmill reads 1"):
        load_run(tmp_path)


def test_parts_of_the_wrong_shape_count_as_not_measured() -> None:
    run = Run(path="r", label="r", parts={"training": {"metrics": [1, 2], "samples_per_s": "fast"}})
    assert run.number("training", "metrics", "auc") is None
    assert run.number("training", "samples_per_s") is None


def test_compare_prints_the_table_and_writes_the_page(baseline: Path, faster: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages/ablation.html"
    result = CliRunner().invoke(compare, [str(baseline), str(faster), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert out.exists()
    line = next(line for line in result.stdout.splitlines() if line.startswith("Training throughput"))
    assert line.replace("\u00a0", " ").split("  ")[-1].strip() == "16 k (2.00×)"


def test_compare_speaks_json(baseline: Path, faster: Path, tmp_path: Path) -> None:
    arguments = [str(baseline), str(faster), "--out", str(tmp_path / "page.html"), "--json"]
    result = CliRunner().invoke(compare, arguments, catch_exceptions=False)
    printed = json.loads(result.stdout)
    assert printed["baseline"] == "baseline"
    assert printed["report"] == str(tmp_path / "page.html")
    assert [run["name"] for run in printed["runs"]] == ["baseline", "dedup"]
    assert printed["runs"][1]["ratios"]["samples_per_s"] == pytest.approx(2.0)


def test_compare_of_a_missing_run_ends_with_one_line_and_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path / "nowhere"), "--out", str(tmp_path / "page.html")])
    assert ended.value.code == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_data_is_compared(baseline: Path, faster: Path) -> None:
    table = {row[0].figure.key: row for row in compare_runs(load_runs([baseline, faster]))}
    assert [cell.value for cell in table["stall_share"]] == pytest.approx([0.04, 0.04])
