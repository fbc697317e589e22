"""A version is served if it passes the gate; servers that do not take it get the one before back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from recmill.artifacts import InputError
from recmill.serving.server.rollout import RolloutPlan, roll_out
from recmill.serving.server.versions import load_version, model_folder
from tests.unit.serving.server.served_models import write_served_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("trained")
    return [write_served_model(home / f"model{seed}", seed=seed) for seed in range(5)]


def plan_of(folder: Path, **settings: Any) -> RolloutPlan:
    return RolloutPlan.from_settings(json.dumps({"folder": str(folder), **settings}))


@contextmanager
def watching_server(folder: Path, *, takes: bool) -> Iterator[str]:
    """A server that names the version that the folder points to; or, if it does not take new ones, always "old"."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = model_folder(folder).name if takes else "old"
            body = json.dumps({"versions": [name]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_better_version_takes_the_place_of_the_one_that_serves(tmp_path: Path, models: list[Path]) -> None:
    first = roll_out(models[0], plan_of(tmp_path), metrics={"auc": 0.70}, registered="1")
    assert (first.stage, first.previous) == ("serving", "")
    assert load_version(model_folder(tmp_path), max_candidates=9).name == first.version
    worse = roll_out(models[1], plan_of(tmp_path), metrics={"auc": 0.69}, registered="2")
    assert worse.stage == "refused"
    assert "auc is 0.69000" in worse.reason
    assert model_folder(tmp_path).name == first.version
    better = roll_out(models[2], plan_of(tmp_path), metrics={"auc": 0.71}, registered="3")
    assert (better.stage, better.previous, better.previous_registered) == ("serving", first.version, "1")
    assert model_folder(tmp_path).name == better.version
    again = roll_out(models[2], plan_of(tmp_path), metrics={"auc": 0.5})
    assert (again.stage, again.reason) == ("serving", "this version serves already")


@pytest.mark.parametrize(
    ("settings", "metrics", "stage"),
    [
        ({"gains": {"auc": 0.01}}, {"auc": 0.705, "log_loss": 0.5}, "refused"),
        ({"gains": {"auc": -0.01}}, {"auc": 0.695, "log_loss": 0.5}, "serving"),
        ({"gains": {"log_loss": 0.0}}, {"auc": 0.5, "log_loss": 0.59}, "serving"),
        ({"gains": {"log_loss": 0.0}}, {"auc": 0.9, "log_loss": 0.61}, "refused"),
        ({"floors": {"auc": 0.8}}, {"auc": 0.75, "log_loss": 0.5}, "refused"),
        ({"floors": {"log_loss": 0.55}}, {"auc": 0.75, "log_loss": 0.54}, "serving"),
    ],
)
def test_the_gate_has_thresholds(
    tmp_path: Path, models: list[Path], settings: dict[str, Any], metrics: dict[str, float], stage: str
) -> None:
    roll_out(models[0], plan_of(tmp_path), metrics={"auc": 0.70, "log_loss": 0.6})
    assert roll_out(models[1], plan_of(tmp_path, **settings), metrics=metrics).stage == stage


def test_a_version_that_servers_take_is_waited_for(tmp_path: Path, models: list[Path]) -> None:
    with watching_server(tmp_path, takes=True) as url:
        outcome = roll_out(models[0], plan_of(tmp_path, url=url, timeout_s=20), metrics={"auc": 0.7})
    assert outcome.stage == "serving"


def test_a_version_that_servers_do_not_take_is_rolled_back(tmp_path: Path, models: list[Path]) -> None:
    first = roll_out(models[0], plan_of(tmp_path), metrics={"auc": 0.7})
    with watching_server(tmp_path, takes=False) as url:
        outcome = roll_out(models[1], plan_of(tmp_path, url=url, timeout_s=0.2), metrics={"auc": 0.8})
    assert outcome.stage == "rolled_back"
    assert "it serves version old" in outcome.reason
    assert model_folder(tmp_path).name == first.version
    # Its metrics are not those that the next version is compared with.
    assert roll_out(models[2], plan_of(tmp_path), metrics={"auc": 0.75}).stage == "serving"
    gone = plan_of(tmp_path, url="http://127.0.0.1:1", timeout_s=0.1)
    assert "did not answer" in roll_out(models[3], gone, metrics={"auc": 0.9}).reason


def test_old_versions_are_deleted_but_never_the_last_two(tmp_path: Path, models: list[Path]) -> None:
    outcomes = [roll_out(model, plan_of(tmp_path), metrics={"auc": 0.7}) for model in models]
    kept = {path.name for path in (tmp_path / "versions").iterdir()}
    assert kept == {outcome.version for outcome in outcomes[-3:]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"folder": 3}', "folder is 3"),
        ("{", "expected a JSON object"),
        ('{"url": "http://x"}', "key folder"),
        ('{"folder": "/f", "gain": {}}', "gain is"),
        ('{"folder": "/f", "gains": {"auc": "much"}}', "gains.auc is 'much'"),
        ('{"folder": "s3://bucket/f"}', "on a volume"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        RolloutPlan.from_settings(text)


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path, models: list[Path]) -> None:
    with pytest.raises(InputError, match="no metric 'ndcg'"):
        roll_out(models[0], plan_of(tmp_path, floors={"ndcg": 0.1}), metrics={"auc": 0.7})
