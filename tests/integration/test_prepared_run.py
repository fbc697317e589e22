"""From events as they are to a trained model and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Checkpoint
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary, VocabularyMap
from tests.unit.data.inspection.test_proposal import movielens

TAOBAO = Path(os.environ.get("RECMILL_DATA_DIR", "")) / "taobao" / "behavior.parquet"
# The five lines of the proposal that a user changes: purchases, carts and favourites against drawn items.
EDITS = {
    "  - {name: label, where: [{column: behavior, one_of: [buy, cart, fav]}]}": "  - {name: label, every: true}",
    "negatives: {kind: none}": (
        "negatives: {kind: popular}\nsamples: {where: [{column: behavior, one_of: [buy, cart, fav]}]}"
    ),
    "  - {name: history, history: {of: item, last: 50}, kind: sequence, table: item}": (
        "  - {name: viewed, history: {of: item, last: 20, where: [{column: behavior, equals: pv}]}, table: item}"
    ),
    "splits: {test: 0.1}": "splits: {test: 2017-12-03}",
}


def propose(sources: Path, log_yaml: Path) -> None:
    command = [sys.executable, "-m", "recmill", "init", str(sources), "--out", str(log_yaml)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def run(log_yaml: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recmill", "run", "--data", str(log_yaml), "--out", str(out)]
    command += ["--no-baseline", "--no-tracking", "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.skipif(not TAOBAO.is_file(), reason="no taobao/behavior.parquet in RECMILL_DATA_DIR")
def test_taobao_goes_from_its_original_file_to_a_report(tmp_path):
    """`init`, five edited lines, `run`."""
    propose(TAOBAO, tmp_path / "log.yaml")
    text = (tmp_path / "log.yaml").read_text()
    for line, changed in EDITS.items():
        assert text.count(f"{line}\n") == 1, line
        text = text.replace(line, changed)
    (tmp_path / "log.yaml").write_text(text)
    out = tmp_path / "run"
    ended = run(tmp_path / "log.yaml", out, "--set", "batch_size=512")
    assert ended.returncode == 0, ended.stderr
    assert "taobao" in (tmp_path / "log.yaml").read_text()
    assert (out / "report.html").is_file()
    assert json.loads((out / "steps/prepare_log.json").read_text())["outputs"]["raw_log"]["path"] == str(out / "raw")
    assert json.loads(ended.stdout)
    raw = Schema.load(out / "raw")
    events = pq.read_table(TAOBAO)
    positives = sum(behavior in ("buy", "cart", "fav") for behavior in events["behavior"].to_pylist())
    assert raw.info["num_events"] == len(events)
    assert raw.info["num_samples"] * raw.info["base_rate"] == pytest.approx(positives)  # every positive once
    assert (raw.user, raw.item) == ("user", "item")
    assert pq.read_table(out / "raw/vocabulary/category.parquet").num_rows == raw.feature("category").num_rows - 1


@pytest.mark.slow
def test_movielens_goes_from_its_original_files_to_a_report(tmp_path):
    """`init` and `run`, without an edit, on files in the shape that GroupLens publishes."""
    (tmp_path / "ml-1m").mkdir()
    movielens(tmp_path / "ml-1m")
    (tmp_path / "ml-1m/README").write_text("SUMMARY\n")
    propose(tmp_path / "ml-1m", tmp_path / "log.yaml")
    out = tmp_path / "run"
    ended = run(tmp_path / "log.yaml", out, "--set", "batch_size=64", "--set", "max_steps=10")
    assert ended.returncode == 0, ended.stderr
    assert (out / "report.html").is_file()
    raw = Schema.load(out / "raw")
    assert (raw.info["num_events"], raw.info["num_users"], raw.info["num_items"]) == (1500, 60, 45)
    assert raw.feature("movies_column2").kind == "sparse"  # genres


@pytest.mark.slow
def test_a_run_on_an_empty_day_ends_with_one_sentence(tmp_path):
    events = [f"{n % 40},{n % 9},{86_400 * (n % 3 + n % 3 // 2) + n},{'buy' if n % 2 else 'view'}" for n in range(300)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,at,kind", *events]) + "\n")
    (tmp_path / "log.yaml").write_text(SHOP)
    ended = run(tmp_path / "log.yaml", tmp_path / "run")
    assert ended.returncode == 2, ended.stderr
    assert "events.time: day 1970-01-03 has no events" in ended.stderr
    assert "Traceback" not in ended.stderr


SHOP = """
format_version: 1
sources: {events: {path: events.csv}}
events: {source: events, user: user, item: item, time: {column: at, unit: s}, session: {gap: 30min}}
labels: [{name: bought, where: [{column: kind, equals: buy}]}]
features:
- {name: user, column: user, kind: sparse, dim: 4}
- {name: item, column: item, kind: sparse, dim: 4}
"""


@pytest.mark.slow
def test_a_run_goes_on_with_the_model_of_the_day_before(tmp_path):
    """The vocabulary of the new log.yaml extends the model's; another log is refused."""
    for day, items in ((1, "abca"), (2, "adeb")):
        folder = tmp_path / f"day{day}"
        folder.mkdir()
        events = [
            f"{n % 40},{item},{day * 86_400 + 60 * n},{'buy' if n % 3 else 'view'}" for n, item in enumerate(items * 60)
        ]
        (folder / "events.csv").write_text("\n".join(["user,item,at,kind", *events]) + "\n")
        (folder / "log.yaml").write_text(SHOP)

    def run(day, *more):
        command = [sys.executable, "-m", "recmill", "run", "--data", f"day{day}/log.yaml", "--out", f"run{day}"]
        command += ["--no-baseline", "--no-tracking", "--json", "--set", "max_steps=3", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)

    first = run(1, "--set", "batch_size=32", "--set", "top_layers=8")
    assert first.returncode == 0, first.stderr
    second = run(2, "--from", "run1/train/checkpoint")
    assert second.returncode == 0, second.stderr
    before, now = (Checkpoint.load(tmp_path / f"run{day}/train/checkpoint") for day in (1, 2))
    assert now.inputs["start_from"] == before.content_hash
    assert (now.config["batch_size"], now.config["top_layers"]) == (32, [8])
    old, new = (VocabularyMap.load(tmp_path / f"run{day}/raw") for day in (1, 2))
    assert new.version == 2
    assert new.extends(old)
    assert Vocabulary.load(tmp_path / "run2/train/checkpoint", "item").rows("abcde").tolist() == [1, 2, 3, 4, 5]
    missing = run(3, "--from", "nowhere")
    assert (missing.returncode, "nowhere: no such folder" in missing.stderr) == (2, True)
