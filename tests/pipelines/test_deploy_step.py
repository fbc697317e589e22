"""deploy_model: wired only if settings ask for it; it marks the registered version in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.deploy_model.step import deploy_trained
from components.form import read_form
from pipelines.options import is_deployed
from pipelines.train import steps_of
from recmill.artifacts import InputError, dump_record
from recmill.tracking import StepRun
from recmill.tracking.models import find_version, mark_version
from recmill.tracking.server import load_mlflow
from tests.unit.serving.server.served_models import write_served_model


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"deploy": "none"}, False), ({"deploy": "/srv"}, True), ({"deploy": {"folder": "/srv"}}, True)],
)
def test_the_pipeline_ends_with_deploy_model_if_settings_say_where(settings: dict[str, Any], expected: bool) -> None:
    form = {"settings": json.dumps(settings)}
    assert is_deployed(form) is expected
    steps = steps_of(with_baseline=False, with_sharing=False, with_deployment=is_deployed(form))
    assert (steps[-1] == "deploy_model") is expected
    told = read_form(settings=json.dumps(settings)).deploy
    assert (told != "none") is expected


def test_a_form_with_a_wrong_gate_is_refused() -> None:
    with pytest.raises(InputError, match=r"deploy: gains\.auc"):
        read_form(settings=json.dumps({"deploy": {"folder": "/srv", "gains": {"auc": "x"}}}))


class StageRecorder:
    """Keeps what a step marks."""

    def __init__(self) -> None:
        self.marks: list[dict[str, str]] = []

    def stage(self, **mark: str) -> None:
        self.marks.append(mark)


def run_step(folder: Path, deploy: str, *, auc: float, registered: str) -> tuple[StageRecorder, str]:
    (folder / "train").mkdir(exist_ok=True)
    record = {"format_version": 1, "kind": "training", "metrics": {"auc": auc, "labels": []}}
    (folder / "train/result.json").write_text(dump_record(record), encoding="utf-8")
    recorder, summary = StageRecorder(), SimpleNamespace(path=str(folder / "summary.md"))
    step: Any = StepRun(step="deploy_model", workdir=str(folder), recorder=recorder)  # type: ignore[arg-type]
    deploy_trained(step, deploy, registered=registered, summary=summary)
    return recorder, (folder / "summary.md").read_text(encoding="utf-8")


def test_the_step_serves_refuses_and_marks(tmp_path: Path) -> None:
    served = str(tmp_path / "served")
    recorder, _ = run_step(tmp_path, "none", auc=0.7, registered="")
    assert not recorder.marks
    write_served_model(tmp_path / "model", seed=1)
    recorder, summary = run_step(tmp_path, served, auc=0.7, registered="1")
    assert recorder.marks[0]["stage"] == "serving"
    assert "serving" in summary
    write_served_model(tmp_path / "model", seed=2)
    recorder, summary = run_step(tmp_path, served, auc=0.6, registered="2")
    assert (recorder.marks[0]["stage"], recorder.marks[0]["version"]) == ("refused", "2")
    plan = json.dumps({"folder": served, "url": "http://127.0.0.1:1", "timeout_s": 0.1})
    with pytest.raises(RuntimeError, match="rolled back to version"):
        run_step(tmp_path, plan, auc=0.8, registered="2")


@pytest.mark.slow
def test_mlflow_holds_the_stage_of_each_version(tmp_path: Path) -> None:
    mlflow = load_mlflow()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("shop")
    client.create_registered_model("dlrm")
    for _ in range(3):
        parent = client.create_run(experiment)
        child = client.create_run(experiment, tags={"mlflow.parentRunId": parent.info.run_id})
        client.create_model_version("dlrm", "file:///nowhere", child.info.run_id)
        version = find_version(client, "dlrm", parent_run_id=parent.info.run_id)
        mark_version(client, "dlrm", version, stage="refused" if version == "2" else "serving", reason="why")
    aliases = client.get_registered_model("dlrm").aliases
    assert {name: str(version) for name, version in aliases.items()} == {"serving": "3", "previous": "1"}
    stages = [client.get_model_version("dlrm", version).tags["recmill.stage"] for version in ("1", "2", "3")]
    assert stages == ["retired", "refused", "serving"]
