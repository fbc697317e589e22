"""`recmill compare --preset` trains every variant and writes the page that shows what each switch bought."""

import json
import re

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli import cli
from recmill.training.switches import Switch, ablation_variants

ORDER = ("baseline", "+dedup")  # of the first turn; the second is the other way round


def test_variants_are_none_each_all_but_each_and_all():
    names = [variant.name for variant in ablation_variants()]
    assert (names[0], names[-1]) == ("baseline", "all")
    assert names[1:6] == [f"+{switch}" for switch in Switch]
    assert names[6:-1] == [f"all-{switch}" for switch in Switch]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    command = ["compare", "--preset", "tiny", "--work", str(folder / "work"), "--nproc", "2", "--switch", "dedup"]
    command += ["--repeats", "3"]
    settings = {"data.sessions": 300, "batch_size": 512, "threads": 1, "eval_every": 4}
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environment = {"RECMILL_TRACKING": "off", "OMP_NUM_THREADS": "1"}
    shown = CliRunner().invoke(cli, command, env=environment, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    answer = CliRunner().invoke(
        cli, [*command, "--json"], env=environment, catch_exceptions=False
    )  # nothing is trained
    assert answer.exit_code == 0, answer.output
    return folder / "work", json.loads(answer.stdout), command, shown.stderr


def test_both_variants_see_the_same_samples_and_the_page_shows_them(compared):
    work, answer, *_ = compared
    manifest = json.loads((work / "ablation.json").read_text())
    assert [variant["name"] for variant in manifest["variants"]] == ["baseline", "+dedup"]
    results = [json.loads((work / name / "train" / "result.json").read_text()) for name in ("baseline", "+dedup")]
    assert results[0]["num_samples"] == results[1]["num_samples"] > 0
    assert not results[0]["dedup"]["groups"]
    assert manifest["variants"][0]["median"]["wire_bytes_per_sample"] > 0
    page = (work / "report.html").read_text()
    assert "What each switch gains" in page
    assert [entry["name"] for entry in answer["variants"]] == ["baseline", "+dedup"]


def test_a_log_has_one_line_per_training(compared):
    work, _, _, log = compared
    lines = [line.strip() for line in log.splitlines() if "trained" in line or "train step" in line or "eval" in line]
    rate = r"[0-9,]+ samples/s, AUC 0\.\d{4}"
    for done, (line, name) in enumerate(zip(lines, (*ORDER, *ORDER[::-1], *ORDER), strict=True), start=1):
        assert re.fullmatch(rf"trained {re.escape(name)}, {rate}: {done} of 6 \({done / 6:.0%}\)", line), line
    baseline = json.loads((work / "baseline" / "train" / "result.json").read_text())
    assert f"AUC {baseline['metrics']['auc']:.4f}" in lines[0]


def test_repeats_differ_in_their_seed_and_give_an_interval_and_a_standard_error(compared):
    work, answer, *_ = compared
    baseline, dedup = json.loads((work / "ablation.json").read_text())["variants"]
    repeats = sorted((work / "+dedup" / "repeats").iterdir())
    assert [json.loads((folder / "result.json").read_text())["config"]["seed"] for folder in repeats] == [1, 2]
    assert not any((folder / "checkpoint").exists() for folder in repeats)
    aucs = [[repeat["auc"] for repeat in variant["repeats"]] for variant in (baseline, dedup)]
    assert len(set(aucs[0])) == 3
    differences = [own - other for own, other in zip(aucs[1], aucs[0], strict=True)]
    shown = answer["variants"][1]
    assert shown["auc_difference"] == pytest.approx(sum(differences) / 3)
    assert shown["interval"][0] <= shown["ratio"] <= shown["interval"][1]
    assert [repeat["peak_memory_bytes"] is None for repeat in dedup["repeats"]] == [False, True, True]


def test_the_same_command_with_another_seed_is_refused_where_results_lie(compared):
    _, _, command, _ = compared
    refused = CliRunner().invoke(cli, [*command, "--set", "seed=5"], env={"RECMILL_TRACKING": "off"})
    assert isinstance(refused.exception, InputError)
    assert "holds a comparison with other settings (config)" in str(refused.exception)
