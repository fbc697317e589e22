"""The compiled pipeline: the same bytes every time, and what must and must not be in it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from google.protobuf.json_format import MessageToDict

import recmill
from components.placement import ClusterPlacement
from pipelines.ablations import build_ablations
from pipelines.commands import compile_pipeline
from pipelines.site import Site
from pipelines.train import STEPS, build_partitioned_pipeline, build_pipeline, steps_of
from recmill.artifacts import InputError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "pipeline.yaml"
DEFAULT_STEPS = steps_of(with_baseline=True, with_sharing=False)


def compiled(folder: Path, *args: str) -> bytes:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(folder), *args], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return (folder / "recmill.yaml").read_bytes()


def test_the_compiled_pipeline_is_the_golden_one(tmp_path: Path) -> None:
    """After a change that is meant: recmill compile --out build && cp build/recmill.yaml tests/golden/pipeline.yaml"""
    assert compiled(tmp_path).decode() == GOLDEN.read_text(encoding="utf-8")


def test_compiling_twice_gives_the_same_bytes_and_leaves_one_file(tmp_path: Path) -> None:
    assert compiled(tmp_path) == compiled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recmill.yaml"]


def test_the_result_can_be_read_by_a_machine(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path), "--json"])
    told = json.loads(outcome.stdout)
    assert told["path"] == str(tmp_path / "recmill.yaml")
    assert told["bytes"] == (tmp_path / "recmill.yaml").stat().st_size


def specs(text: bytes | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline, and what Kubernetes is told of its tasks."""
    pipeline, platform = yaml.safe_load_all(text)
    return pipeline, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_the_image_tag_reaches_every_step(tmp_path: Path) -> None:
    spec, _ = specs(compiled(tmp_path, "--image-tag", "abc123", "--image-registry", "reg.test/team/"))
    images = {name: entry["container"]["image"] for name, entry in spec["deploymentSpec"]["executors"].items()}
    assert images == {
        "exec-open-run": "reg.test/team/recmill/data:abc123",
        "exec-generate-data": "reg.test/team/recmill/data:abc123",
        "exec-profile-access": "reg.test/team/recmill/data:abc123",
        "exec-plan-shards": "reg.test/team/recmill/trainer:abc123",
        "exec-tune-ingest": "reg.test/team/recmill/trainer:abc123",
        "exec-train-baseline": "reg.test/team/recmill/trainer:abc123",
        "exec-train-model": "reg.test/team/recmill/trainer:abc123",
        "exec-report": "reg.test/team/recmill/trainer:abc123",
        "exec-close-run": "reg.test/team/recmill/data:abc123",
    }


def test_the_default_tag_is_this_version() -> None:
    assert f"recmill/trainer:{recmill.__version__}" in GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("tag", ["latest", "", "a b", "-x"])
def test_a_tag_that_may_move_or_is_none_is_refused(tmp_path: Path, tag: str) -> None:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path), "--image-tag", tag])
    assert isinstance(outcome.exception, InputError)
    assert "immutable tag" in str(outcome.exception)
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path / "file")])
    assert isinstance(outcome.exception, InputError)
    assert (tmp_path / "file").read_text() == "mine"


def test_no_step_installs_packages_or_takes_the_run_id_as_a_parameter() -> None:
    """Images bring everything; an id that changes with each run would defeat Kubeflow's cache."""
    text = GOLDEN.read_text(encoding="utf-8")
    assert "pip install" not in text
    assert "pipeline_job_uuid" not in text
    assert text.count("name: KFP_RUN_ID") == len(DEFAULT_STEPS) + 1  # and the task that closes the run


@pytest.mark.parametrize("step", STEPS)
def test_folder_function_and_step_share_one_name_and_the_step_is_thin(step: str) -> None:
    tree = ast.parse((ROOT / "components" / step / "component.py").read_text(encoding="utf-8"))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.name == step
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    assert len(statements) <= 30


def tasks_of(text: bytes | str) -> dict[str, set[str]]:
    """The tasks of the pipeline and those that each waits for."""
    tasks = specs(text)[0]["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    return {name: set(task.get("dependentTasks", ())) for name, task in tasks.items()}


def test_the_default_pipeline_trains_a_baseline_and_then_the_model() -> None:
    tasks = tasks_of(GOLDEN.read_text(encoding="utf-8"))
    assert set(tasks) == {step.replace("_", "-") for step in DEFAULT_STEPS}
    assert tasks["train-baseline"] == {"open-run", "generate-data", "profile-access", "tune-ingest"}
    assert "train-baseline" in tasks["train-model"]  # never both at a time: their speeds are compared


def test_the_graph_has_the_trainings_that_were_chosen(tmp_path: Path) -> None:
    alone = tasks_of(compiled(tmp_path, "--no-baseline"))
    assert not {"train-baseline", "train-shared"} & set(alone)
    everything = tasks_of(compiled(tmp_path, "--with-sharing"))
    assert "train-model" in everything["train-shared"]
    assert "train-shared" in everything["report"]


def test_outputs_are_of_the_kinds_that_the_ui_shows() -> None:
    spec = next(yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8")))
    kinds = {
        name.removeprefix("comp-"): {
            output: entry["artifactType"]["schemaTitle"].removeprefix("system.")
            for output, entry in component["outputDefinitions"]["artifacts"].items()
        }
        for name, component in spec["components"].items()
        if "artifacts" in component.get("outputDefinitions", {})
    }
    assert kinds == {
        "generate-data": {"dataset": "Dataset", "baseline_data": "Dataset", "dataset_summary": "Markdown"},
        "profile-access": {"profile": "Artifact", "access_summary": "Markdown"},
        "plan-shards": {"plan": "Artifact", "placement_summary": "Markdown"},
        "tune-ingest": {"allocation": "Artifact", "ingest_metrics": "Metrics"},
        "train-baseline": {
            "baseline_model": "Model",
            "baseline_metrics": "Metrics",
            "baseline_roc_curve": "ClassificationMetrics",
        },
        "train-model": {"model": "Model", "training_metrics": "Metrics", "roc_curve": "ClassificationMetrics"},
        "report": {"report_page": "HTML"},
    }


@pytest.mark.parametrize(
    ("build", "inside"),
    [
        (build_pipeline, "open, generate, profile, plan, tune, baseline, train, report"),
        (partial(build_pipeline, with_baseline=False), "open, generate, profile, plan, tune, train, report"),
        (
            partial(build_pipeline, with_sharing=True),
            "open, generate, profile, plan, tune, baseline, train, shared, report",
        ),
        (
            partial(build_pipeline, with_preparation=True, with_baseline=False),
            "open, prepare, generate, profile, plan, tune, train, report",
        ),
        (build_partitioned_pipeline, "open, generate, merge, profile, plan, tune, train, report"),
        (build_ablations, "open, generate, profile, plan, tune, train, compare"),
    ],
)
def test_the_first_picture_says_what_is_inside_and_artifacts_have_names_of_their_own(
    build: Callable[[Site], Any], inside: str
) -> None:
    spec = MessageToDict(build(Site(placement=ClusterPlacement())).pipeline_spec)
    boxes = {name: task["taskInfo"]["name"] for name, task in spec["root"]["dag"]["tasks"].items()}
    assert boxes == {"exit-handler-1": inside, "close-run": "close-run"}
    made = [
        name
        for component in spec["components"].values()
        if "executorLabel" in component  # a sub-graph hands on what its tasks made
        for name in component.get("outputDefinitions", {}).get("artifacts", {})
    ]
    assert len(made) == len(set(made))
