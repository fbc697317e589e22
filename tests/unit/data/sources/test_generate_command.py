import importlib
import inspect
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli import cli, main
from recmill.data.sources.presets import PRESETS, training_settings
from recmill.training.config import TrainConfig


def test_both_commands_offer_every_preset():
    for command in ("generate", "run"):
        shown = CliRunner().invoke(cli, [command, "--help"]).output.replace("\n", "").replace(" ", "")
        assert "|".join(PRESETS) in shown


def test_the_list_of_presets_loads_nothing_slow():
    code = "import sys; import recmill.data.sources; print({'numpy', 'pyarrow', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_every_preset_can_be_made_and_trained():
    for name, preset in PRESETS.items():
        TrainConfig.from_overrides(training_settings(name))
        if preset.config is not None:
            assert preset.config().name == name
        else:
            module, _, function = preset.converter.partition(":")
            convert = getattr(importlib.import_module(f"recmill.data.sources.{module}"), function)
            assert set(preset.overrides) < set(inspect.signature(convert).parameters)
            assert preset.home
            assert preset.candidates


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
