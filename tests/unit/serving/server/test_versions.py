"""A new version takes the place of the one that serves; a broken one does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recmill.artifacts import InputError
from recmill.serving.server.settings import ServerSettings
from recmill.serving.server.versions import ServedModel, blank_request, model_folder
from tests.unit.serving.server.served_models import write_served_model


def link(target: Path, at: Path) -> None:
    scratch = at.with_name(f".{at.name}")
    scratch.symlink_to(target)
    os.replace(scratch, at)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("pair")
    return write_served_model(home / "one", seed=1), write_served_model(home / "two", seed=2)


def test_a_link_that_moves_is_a_new_version(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    link(pair[0], tmp_path / "current")
    seen: list[str | None] = []
    served = ServedModel(
        tmp_path, max_candidates=9, reloaded=lambda version: seen.append(version.name if version else None)
    )
    first, batch = served.version, blank_request(served.version.signature, 3)
    assert not served.refresh()
    link(pair[1], tmp_path / "current")
    assert served.refresh()
    assert served.version.name != first.name
    assert seen == [served.version.name]
    assert served.version.folder == pair[1].resolve()
    # What was read for the old version is still scored by it.
    assert (first.model.score(batch) != served.version.model.score(batch)).all()


def test_a_file_with_a_name_is_a_pointer_too(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    (tmp_path / "current").write_text(f"{pair[0]}\n", encoding="utf-8")
    assert model_folder(tmp_path) == pair[0].resolve()
    (tmp_path / "current").write_text(" \n", encoding="utf-8")
    with pytest.raises(InputError, match="is empty"):
        model_folder(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        model_folder(tmp_path / "nothing")


def test_a_folder_that_is_written_again_is_a_new_version(tmp_path: Path) -> None:
    served = ServedModel(write_served_model(tmp_path / "model", seed=1), max_candidates=9)
    before = served.version.name
    write_served_model(tmp_path / "model", seed=2)
    assert served.refresh()
    assert served.version.name != before


def test_a_broken_version_is_not_served_and_not_tried_all_the_time(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    link(pair[0], tmp_path / "current")
    seen: list[str | None] = []
    served = ServedModel(
        tmp_path, max_candidates=9, reloaded=lambda version: seen.append(version.name if version else None)
    )
    first = served.version
    broken = write_served_model(tmp_path / "broken", seed=3)
    (broken / "request/dense.safetensors").write_bytes(b"damaged")
    link(broken, tmp_path / "current")
    assert not served.refresh()
    assert not served.refresh()
    assert served.version is first
    assert seen == [None]
    (tmp_path / "current").unlink()
    assert not served.refresh()  # MODEL itself is no model: the old version stays
    link(pair[1], tmp_path / "current")
    assert served.refresh()


def test_a_folder_without_a_model_is_counted_and_logged_once(
    tmp_path: Path, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    link(pair[0], tmp_path / "current")
    seen: list[object] = []
    served = ServedModel(tmp_path, max_candidates=9, reloaded=seen.append)
    before = served.version.name
    (tmp_path / "no model").mkdir()
    link(tmp_path / "no model", tmp_path / "current")
    for _ in range(3):
        assert not served.refresh()
    assert seen == [None]
    assert [own.message for own in caplog.records if "no new version" in own.message] == [
        f"no new version: {tmp_path / 'no model'}/request/request.json: not found; expected a folder that recmill "
        f"export wrote; version {before} serves on"
    ]
    link(pair[1], tmp_path / "current")
    assert served.refresh()


def test_settings_survive_the_way_to_the_process() -> None:
    settings = ServerSettings(model="/m", port=1, latency_budget_s=0.5, as_json=True)
    assert ServerSettings.from_argument(settings.to_argument()) == settings
