"""Old runs are removed; new ones, those to keep and what is no run stay."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli import cli
from recmill.tracking.retention import find_runs, remove_run

DAY_S = 86_400


def make_run(folder: Path, *, days: float, kind: str = "run") -> Path:
    (folder / "train" / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "kind": kind}))
    (folder / "train" / "checkpoints" / "weights").write_bytes(b"0" * 1000)
    (folder / "plan").symlink_to(folder.parent / "log")
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - days * DAY_S,) * 2, follow_symlinks=False)
    return folder


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    for name, days in (("old", 40), ("older", 50), ("oldest", 60), ("new", 1)):
        make_run(tmp_path / name, days=days)
    make_run(tmp_path / "dataset", days=90, kind="dataset")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "day.parquet").touch()
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def clean(folder: Path, *flags: str) -> dict:
    answer = CliRunner().invoke(cli, ["clean", str(folder), *flags, "--json"], catch_exceptions=False)
    return json.loads(answer.stdout)


def test_old_runs_go_and_the_newest_and_everything_else_stay(volume):
    before = names(volume)
    assert clean(volume, "--keep", "2", "--dry-run")["removed"] == ["older", "oldest"]
    assert names(volume) == before
    told = clean(volume, "--keep", "2")
    assert told["bytes"] > 2000
    assert names(volume) == before - {"older", "oldest"}
    assert (volume / "log" / "day.parquet").exists()  # behind a link of a run


def test_a_run_that_is_still_written_to_stays(volume):
    (volume / "oldest" / "train" / "checkpoints" / "newest").touch()
    assert clean(volume, "--keep", "0")["removed"] == ["old", "older"]


def test_an_interrupted_removal_is_finished_by_the_next(volume, monkeypatch):
    (run,) = [run for run in find_runs(volume) if run.path.name == "old"]
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match="interrupted"):
        remove_run(run)
    assert (volume / "old" / "run.json").exists()


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        find_runs(tmp_path / "nowhere")
