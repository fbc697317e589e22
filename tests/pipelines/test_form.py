"""The form of a run: what Kubeflow shows of it, what its fields mean, and how wrong values are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from components.form import FIELDS, RARE, check_partitions, folder_of_run, read_form, read_start
from pipelines.commands import compile_pipeline
from pipelines.options import PIPELINES
from recmill.artifacts import Checkpoint, InputError
from recmill.training.config import TrainConfig
from tests.datasets import ranking_schema

SWITCHES = {"dedup", "tiers", "hot_batches", "sharing", "tuning"}


def form_of(folder: Path, *args: str) -> dict[str, dict[str, Any]]:
    """The form as the UI reads it from an uploaded file."""
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(folder), *args], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    (path,) = folder.glob("*.yaml")
    parameters: dict[str, dict[str, Any]] = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))["root"][
        "inputDefinitions"
    ]["parameters"]
    return parameters


@pytest.mark.parametrize("kind", PIPELINES)
def test_every_field_has_a_description_and_a_default(tmp_path: Path, kind: str) -> None:
    form = form_of(tmp_path, "--pipeline", kind)
    for name, field in form.items():
        assert len(field["description"]) > 20, name
        if name in ("partitions", "ablations"):  # lists; where a log's folders lie, nobody else knows
            assert ("defaultValue" in field) == (name == "ablations")
        else:
            assert field["defaultValue"] == FIELDS[name].default, name
    assert {"nproc", "num_nodes", "memory_budget", "hot_budget", "workdir", "settings"} <= set(form)


def test_switches_and_presets_are_drop_downs(tmp_path: Path) -> None:
    form = form_of(tmp_path)
    assert {name: field["literals"] for name, field in form.items() if name in SWITCHES} == {
        name: ["auto", "on", "off"] for name in SWITCHES
    }
    assert {"auto", "tiny", "demo", "parquet"} <= set(form["preset"]["literals"])
    assert len(form) == 14


def test_flags_of_compile_fill_the_form_in(tmp_path: Path) -> None:
    form = form_of(tmp_path, "--preset", "small", "--nproc", "2", "--tiers", "true", "--set", "epochs=2")
    assert (form["preset"]["defaultValue"], form["nproc"]["defaultValue"]) == ("small", 2)
    assert form["tiers"]["defaultValue"] == "on"
    assert json.loads(form["settings"]["defaultValue"]) == {"epochs": "2"}
    assert form["preset"]["literals"] == list(FIELDS["preset"].choices)


def test_an_empty_form_trains_the_tiny_preset() -> None:
    told = read_form()
    assert (told.preset, told.layout, told.eval_fraction, told.engine) == ("tiny", "auto", 0.1, "duckdb")
    assert (told.memory_budget_bytes, told.compress, told.master) == (2**30, "none", "none")
    assert json.loads(told.settings) == {"eval_every": "6"}  # what suits the preset
    assert json.loads(told.data_settings) == {}


def test_one_settings_field_holds_what_is_set_rarely() -> None:
    settings = {"epochs": 2, "shuffle": False, "top_layers": [32, 16], "data.sessions": 500, "layout": "time"}
    told = read_form(preset="demo", labels="click,purchase", settings=json.dumps(settings | {"eval_fraction": 0.2}))
    assert json.loads(told.settings) == {
        "batch_size": "1024",
        "eval_every": "16",
        "epochs": "2",
        "shuffle": "false",
        "top_layers": "32,16",
    }
    assert json.loads(told.data_settings) == {"sessions": "500", "labels": "click,purchase"}
    assert (told.layout, told.eval_fraction) == ("time", 0.2)


def test_switches_become_settings_of_the_training() -> None:
    told = read_form(switches={"dedup": "off", "sharing": "on"}, settings='{"tiers": "false", "dedup": "true"}')
    assert json.loads(told.settings) == {"eval_every": "6", "tiers": "false", "dedup": "false", "sharing": "true"}
    assert told.compress == "10"
    assert read_form(switches={"sharing": "on"}, settings='{"compress": "64MiB"}').compress == "64MiB"


def test_own_data_is_a_log_of_parquet_files() -> None:
    assert read_form(data="/runs/log").preset == "parquet"
    assert read_form(data="/runs/globo", preset="globo").preset == "globo"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"preset": "huge"}, "preset is 'huge', expected one of auto, tiny"),
        ({"preset": "parquet"}, "data is empty"),
        ({"switches": {"tiers": "maybe"}}, "tiers is 'maybe', expected one of auto, on, off"),
        ({"nproc": 0}, "nproc is 0, expected 1 or more"),
        ({"num_nodes": -1}, "num_nodes is -1, expected 1 or more"),
        ({"memory_budget": "1 gig"}, "memory_budget: '1 gig' is not a size"),
        ({"hot_budget": "some"}, "hot_budget: 'some' is not a size; write it like 64MiB or 2GB, or auto, or none"),
        ({"settings": "epochs=2"}, "settings: expected a JSON object, received 'epochs=2'"),
        ({"settings": "[1]"}, r"settings: expected a JSON object, received '\[1\]'"),
        ({"settings": '{"epoch": 2}'}, "settings: unknown setting 'epoch', expected one of"),
        ({"settings": '{"data.speed": 2}'}, "unknown setting 'speed' of the data"),
        ({"settings": '{"layout": "rows"}'}, "layout is 'rows', expected one of auto"),
        ({"settings": '{"eval_fraction": 2}'}, "eval_fraction is 2, expected a number from 0 to 0.9"),
        ({"settings": '{"engine": "pandas"}'}, "engine is 'pandas', expected one of duckdb, spark"),
        ({"settings": '{"strict": true}'}, "strict is for data that a log.yaml describes"),
        ({"data": "log.yaml", "settings": '{"strict": 1}'}, "strict is '1', expected one of true, false"),
        ({"data": "/runs/log", "labels": "click"}, "'parquet' has no setting 'labels'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence_that_names_the_field(form: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        read_form(**form)
    assert "\n" not in str(refused.value)


def test_partitions_need_names_of_their_own() -> None:
    check_partitions([{"name": "monday", "data": "/a"}, {"name": "tuesday", "data": "/b"}])
    with pytest.raises(InputError, match="item 0 is '/a', expected an object with name and data"):
        check_partitions(["/a"])
    with pytest.raises(InputError, match="'monday' is given twice"):
        check_partitions([{"name": "monday", "data": "/a"}, {"name": "monday", "data": "/b"}])


def test_a_run_without_a_folder_gets_one_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "d8e880a6")
    assert folder_of_run("", "/runs") == "/runs/d8e880a6"
    assert folder_of_run("/runs/mine", "/runs") == "/runs/mine"
    with pytest.raises(InputError, match="workdir is empty"):
        folder_of_run("", "")


def test_the_description_of_settings_names_every_rare_key() -> None:
    assert all(name in FIELDS["settings"].about for name in RARE)


def test_a_run_from_a_checkpoint_has_its_settings_unless_the_form_says_otherwise(tmp_path: Path) -> None:
    config = replace(TrainConfig(), batch_size=512, top_layers=(8,), sharing="true", dropout=0.5).to_json()
    schema = ranking_schema().to_json()
    body = {"step": 1, "config": config, "schema": schema, "sharing": None, "world_size": 1}
    Checkpoint.of_json(body).seal(tmp_path)
    settings = json.dumps({"from": str(tmp_path), "dropout": 0.1})
    start = read_start(settings)
    told = read_form(settings=settings, start=start)
    saved = {"checkpoint": str(tmp_path), "hash": Checkpoint.load(tmp_path).content_hash}
    assert json.loads(told.start_from) == saved
    own = json.loads(told.settings)
    assert (own["batch_size"], own["top_layers"], own["dropout"]) == ("512", "8", "0.1")
    assert "sharing" not in own
    assert read_start("{}") == {}
    assert json.loads(read_form().start_from) == {}
    assert json.loads(read_form(settings='{"from": "/runs/monday/train/checkpoint"}').start_from) == {
        "checkpoint": "/runs/monday/train/checkpoint"  # on a cluster's volume: open_run reads it
    }
    with pytest.raises(InputError, match="nowhere: no such folder"):
        read_start('{"from": "nowhere"}')
