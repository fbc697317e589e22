import json

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli import cli, main
from recmill.cli.generate import PRESETS as OFFERED
from recmill.data.sources import PRESETS


def test_the_command_offers_every_preset():
    assert OFFERED == PRESETS


def test_json_names_rows_bytes_speed_and_the_best_auc(tmp_path):
    args = ["generate", "--preset", "small", "--sessions", "200", "--samples-per-session", "4", "--zipf", "0.8"]
    args += ["--stay-prob", "0.5", "--seed", "3", "--out", str(tmp_path / "log"), "--json"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["num_sessions"] == 200
    assert summary["num_rows"] > 200
    assert summary["bytes"] == sum(file.stat().st_size for file in (tmp_path / "log").glob("*.parquet"))
    assert summary["samples_per_s"] > 0
    assert 0.7 < summary["info"]["best_auc"] < 0.95
    assert {key: summary["info"][key] for key in ("zipf", "stay_prob", "seed")} == {
        "zipf": 0.8,
        "stay_prob": 0.5,
        "seed": 3,
    }


def test_people_read_the_best_auc(tmp_path):
    result = CliRunner().invoke(
        cli, ["generate", "--preset", "tiny", "--sessions", "50", "--out", str(tmp_path / "log")]
    )
    assert result.exit_code == 0, result.output
    assert "best AUC" in result.output
    assert "samples/s" in result.output


def test_wrong_settings_end_with_exit_code_2_and_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--preset", "tiny", "--stay-prob", "2", "--out", str(tmp_path / "log")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error == "recmill: error: preset 'tiny': stay-prob is 2.0, expected between 0 and 1"
    assert not (tmp_path / "log").exists()


def test_data_for_a_synthetic_preset_is_refused(tmp_path):
    result = CliRunner().invoke(cli, ["generate", "--preset", "tiny", "--data", "x", "--out", str(tmp_path / "log")])
    assert isinstance(result.exception, InputError)
