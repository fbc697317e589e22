"""The step that prepares a log.yaml: in the compiled graph, and run on a small shop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kfp import dsl

from components.prepare_log.component import prepare_log
from components.versions import version_of
from pipelines.commands import compile_pipeline
from pipelines.options import is_prepared
from recmill.artifacts import InputError, read_json
from recmill.data.schema import Schema
from tests.event_logs import Options, Shop


@pytest.fixture(scope="module")
def log_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Shop.random(3, 60).write(tmp_path_factory.mktemp("shop"), Options())


def run_step(log_yaml: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> dict[str, Any]:
    """The step's outputs, as kfp passes them, by name."""
    monkeypatch.setenv("RECMILL_TRACKING", "off")
    kinds = {"raw_log": dsl.Artifact, "log_summary": dsl.Markdown, "log_metrics": dsl.Metrics}
    folder.mkdir()
    outputs = {name: kind(name=name, uri=str(folder / name), metadata={}) for name, kind in kinds.items()}
    told = {"preset": "parquet", "data_settings": json.dumps(settings), "data_version": "1"}
    prepare_log.python_func(**outputs, **told, data=str(log_yaml), workdir=str(folder / "run"))
    return outputs


def test_the_step_writes_a_raw_log_a_summary_and_its_record(
    log_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = run_step(log_yaml, tmp_path / "step", monkeypatch)
    raw = tmp_path / "step/run/raw"
    assert {path.name for path in raw.iterdir()} >= {"schema.json", "checks.json", "vocabulary"}
    record = read_json(tmp_path / "step/run/steps/prepare_log.json")
    info = Schema.load(raw).info
    assert outputs["raw_log"].metadata == record["outputs"]["raw_log"]
    assert outputs["raw_log"].metadata["path"] == str(raw)
    assert record["metrics"]["num_rows"] == info["num_samples"]
    assert record["metrics"]["written_bytes"] == sum(file.stat().st_size for file in raw.glob("log-*.parquet"))
    assert record["metrics"]["rows_per_s"] > 0
    assert outputs["log_metrics"].metadata["base_rate"] == info["base_rate"]
    lines = Path(outputs["log_summary"].path).read_text().splitlines()
    assert all(line.count("|") <= 6 for line in lines)  # five columns
    assert lines[4].startswith(f"| {info['num_samples']:,} | {info['base_rate']:.1%} | {info['num_sessions']:,} |")
    items = len({event["item"] for event in Shop.random(3, 60).events})
    assert any(line.startswith("| `item` |") and line.endswith(f"| {items} |") for line in lines)
    assert any(line.startswith("| `user` | 11 |") and line.endswith("| - |") for line in lines)  # hashed
    assert any(line.startswith(("| warning |", "| info |")) for line in lines)


def test_strict_settings_refuse_a_log_with_warnings(
    log_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="without --strict this is a warning"):
        run_step(log_yaml, tmp_path / "step", monkeypatch, strict="true")
    assert not (tmp_path / "step/run/raw").exists()


def test_data_that_is_no_log_yaml_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"this pipeline was compiled for a log\.yaml"):
        run_step(tmp_path / "folder", tmp_path / "step", monkeypatch)


def test_a_pipeline_compiled_for_a_log_yaml_prepares_it_first(tmp_path: Path) -> None:
    flags = ["--data", "/runs/shop/log.yaml", "--strict", "--no-baseline", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(compile_pipeline, flags, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    spec = next(yaml.safe_load_all((tmp_path / "recmill.yaml").read_text()))
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert tasks["prepare-log"]["dependentTasks"] == ["open-run"]
    assert tasks["generate-data"]["dependentTasks"] == ["open-run", "prepare-log"]
    read = tasks["generate-data"]["inputs"]["artifacts"]["raw_log"]["taskOutputArtifact"]
    assert read == {"outputArtifactKey": "raw_log", "producerTask": "prepare-log"}
    for task in ("prepare-log", "generate-data"):  # so that changed files change the cache key
        version = tasks[task]["inputs"]["parameters"]["data_version"]["taskOutputParameter"]
        assert version == {"outputParameterKey": "data_version", "producerTask": "open-run"}
    form = spec["root"]["inputDefinitions"]["parameters"]
    assert json.loads(form["settings"]["defaultValue"]) == {"strict": True}
    resources = spec["deploymentSpec"]["executors"]
    assert (
        resources["exec-prepare-log"]["container"]["resources"]
        == (resources["exec-generate-data"]["container"]["resources"])
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"data": "log.yaml"}, True),
        ({"data": "s3://bucket/log.yml", "preset": "parquet"}, True),
        ({"data": "log/"}, False),
        ({"data": "log.yaml", "preset": "globo"}, False),
        ({}, False),
    ],
)
def test_a_log_yaml_is_told_by_its_name(form: dict[str, str], expected: bool) -> None:
    assert is_prepared(form) is expected


def test_the_version_changes_with_the_log_yaml_and_with_its_sources(tmp_path: Path) -> None:
    path = Shop.random(3, 60).write(tmp_path, Options())
    first = version_of("parquet", str(path))
    assert version_of("parquet", str(path)) == first
    Shop.random(3, 61).write(tmp_path, Options())
    second = version_of("parquet", str(path))
    assert second != first
    path.write_text(path.read_text() + "\n")
    assert version_of("parquet", str(path)) not in (first, second)
    assert version_of("parquet", str(tmp_path)) == version_of("tiny", "") == "none"


def test_a_mistake_in_the_log_yaml_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file; expected a log\.yaml"):
        version_of("parquet", str(tmp_path / "log.yaml"))
