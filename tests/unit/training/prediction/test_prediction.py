"""Batch prediction: every row once, the same scores however it is read, interrupted and divided."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from recmill.artifacts import Dataset, InputError
from recmill.cli import cli
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.sources.raw_log import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.metrics.pointwise import measure_accuracy
from recmill.training.prediction import predictor, scores
from recmill.training.prediction.predictor import ScoringWork, predict_scores
from recmill.training.prediction.rows import LogRows, cut_parts
from recmill.training.rank.worker import open_run
from recmill.training.serving import evaluate_checkpoint, export_checkpoint
from recmill.training.trainer import make_job

LAYOUTS = ("time", "session", "deduplicated")
CONFIG = TrainConfig(
    batch_size=256, bottom_layers=(8,), top_layers=(8,), max_steps=8, threads=1, tuning="false", hot_batches="false"
)
SMALL = {"rows_per_part": 330}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A log with lists that repeat in sessions, its datasets, and a model."""
    folder = tmp_path_factory.mktemp("predict")
    make_raw_log("recd", out=folder / "raw", overrides={"sessions": 60})
    for layout in LAYOUTS:
        cluster_sessions(folder / "raw", out=folder / layout, layout=layout, eval_fraction=0.3, rows_per_group=64)
    (folder / "run").mkdir()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = make_job(folder / "session", out=folder / "run", nproc=1, config=CONFIG, plan=None, allocation=None)
    open_run(job, torch.device("cpu")).train()
    dist.destroy_process_group()
    return folder


def read_scores(folder):
    """(file, row) -> (session, time, score), of all files; a row that is there twice fails."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])
    rows = {
        (row["file"], row["row"]): (row["session_id"], row["timestamp"], row["score_label"])
        for row in table.to_pylist()
    }
    assert len(rows) == len(table)
    return rows


def by_key(found):
    return {key[:2]: key[2] for key in found.values()}


@pytest.fixture(scope="module")
def expected(work):
    """By session and time."""
    predict_scores(work / "run/checkpoint", work / "session", out=work / "expected", dedup="off")
    return by_key(read_scores(work / "expected"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_has_one_score_whatever_the_layout(work, tmp_path, expected, layout):
    result = predict_scores(work / "run/checkpoint", work / layout, out=tmp_path / "scores", **SMALL)
    dataset, found = Dataset.load(work / layout), read_scores(tmp_path / "scores")
    assert result["num_rows"] == len(found) == dataset.num_rows == len(expected)
    assert len(result["parts"]) > 1
    assert set(found) == {(part.file, row) for part in dataset.parts for row in range(part.num_rows)}
    for part in dataset.parts if layout != "deduplicated" else ():  # its files hold sessions
        rows = pq.read_table(work / layout / part.file, columns=["session_id", "timestamp"]).to_pylist()
        assert [found[part.file, n][:2] for n in range(len(rows))] == [tuple(row.values()) for row in rows]
    own = by_key(found)
    assert own.keys() == expected.keys()
    np.testing.assert_allclose([own[key] for key in expected], list(expected.values()), atol=2e-6)


def test_lists_that_repeat_are_computed_once(work):
    """What the test above compares with dedup=off."""
    opened = ScoringWork.open(work / "run/checkpoint", work / "deduplicated", None)
    assert opened.choose_dedup(cut_parts(opened.rows.groups, 330)[0], "auto").groups


def test_scores_have_the_auc_that_evaluate_measures(work, tmp_path):
    predict_scores(work / "run/checkpoint", work / "session", out=tmp_path / "scores", split="test", **SMALL)
    metrics = evaluate_checkpoint(work / "run/checkpoint", work / "session")["metrics"]
    found = by_key(read_scores(tmp_path / "scores"))
    rows = read_table(work / "session", split="test", columns=["session_id", "timestamp", "label"]).to_pylist()
    own = np.array([found[row["session_id"], row["timestamp"]] for row in rows], np.float64)
    measured = measure_accuracy(np.log(own / (1 - own)), [row["label"] for row in rows])
    assert len(found) == len(rows) == metrics["num_samples"]
    assert measured.auc == pytest.approx(metrics["auc"], abs=1e-6)
    assert measured.log_loss == pytest.approx(metrics["log_loss"], abs=1e-6)


def test_a_log_is_found_by_a_relative_path(work, monkeypatch):
    monkeypatch.chdir(work)
    near, whole = LogRows("raw"), LogRows(work / "raw")
    assert near.groups == whole.groups
    assert near.load(near.groups[0]).keys == whole.load(whole.groups[0]).keys


@pytest.mark.slow  # torch.export
def test_a_log_of_requests_without_labels_is_scored_by_an_exported_model(work, tmp_path, expected):
    log = pa.concat_tables([pq.read_table(path) for path in sorted((work / "raw").glob("*.parquet"))])
    half = len(log) // 2
    for number, rows in enumerate((log.slice(0, half), log.slice(half))):
        (tmp_path / "log/day").mkdir(parents=True, exist_ok=True)
        pq.write_table(rows.drop_columns("label"), tmp_path / f"log/day/{number}.parquet", row_group_size=150)
    (tmp_path / "log/schema.json").write_bytes((work / "raw/schema.json").read_bytes())
    export_checkpoint(work / "run/checkpoint", out=tmp_path / "model", for_mlflow=False)
    predict_scores(tmp_path / "model", tmp_path / "log", out=tmp_path / "scores", **SMALL)
    found = read_scores(tmp_path / "scores")
    assert set(found) == {("day/0.parquet", n) for n in range(half)} | {
        ("day/1.parquet", n) for n in range(len(log) - half)
    }
    assert found["day/1.parquet", 3][:2] == tuple(
        log.slice(half + 3, 1).select(["session_id", "timestamp"]).to_pylist()[0].values()
    )
    own = by_key(found)
    np.testing.assert_allclose([own[key] for key in expected], list(expected.values()), atol=2e-6)
    with pytest.raises(InputError, match="is a raw log, which has no splits, but --split is 'test'"):
        predict_scores(tmp_path / "model", tmp_path / "log", out=tmp_path / "b", split="test")


def test_an_interrupted_prediction_scores_only_what_is_missing(work, tmp_path, monkeypatch):
    """Interrupted before, while and after each part is written."""
    arguments = (work / "run/checkpoint", work / "time")
    size = {"rows_per_part": 500}  # two parts
    whole = predict_scores(*arguments, out=tmp_path / "whole", **size)
    out, scored, write_part = tmp_path / "cut", [], scores.write_part
    for number in range(3 * len(whole["parts"])):

        def interrupted(folder, part, *rest, when=number % 3, **options):
            scored.append(part.number)
            if when == 1:
                (folder / f".{part.file}.1.tmp").write_bytes(b"PAR1")
            if when == 2:
                write_part(folder, part, *rest, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(predictor, "write_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            predict_scores(*arguments, out=out, **size)
        assert not (out / "scores.json").exists()
        if len(list(out.glob("part-*.parquet"))) == len(whole["parts"]):
            break
    assert scored == [n // 3 for n in range(3 * len(whole["parts"]))]
    monkeypatch.setattr(predictor, "write_part", write_part)
    assert predict_scores(*arguments, out=out, **size) == whole | {
        "parts": json.loads((out / "scores.json").read_text())["parts"]
    }
    assert read_scores(out) == read_scores(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    (out / "part-00001.parquet").write_bytes(b"PAR1")
    (out / "scores.json").unlink()
    predict_scores(*arguments, out=out, **size)
    assert read_scores(out) == read_scores(tmp_path / "whole")


@pytest.mark.slow  # loads TorchRec
def test_scores_that_were_damaged_are_not_taken_for_whole(work, tmp_path):
    arguments, out = (work / "run/checkpoint", work / "time"), tmp_path / "scores"
    whole = predict_scores(*arguments, out=out, rows_per_part=500)
    part = out / whole["parts"][1]["file"]
    before = part.read_bytes()
    for changed in (b"", before[:-9], before[:40] + bytes([before[40] ^ 1]) + before[41:]):
        part.write_bytes(changed)
        with pytest.raises(InputError, match=r"part-00001.parquet: is missing or was changed; remove .*scores.json"):
            predict_scores(*arguments, out=out, rows_per_part=500)
    (out / "scores.json").unlink()
    assert predict_scores(*arguments, out=out, rows_per_part=500) == whole
    assert part.read_bytes() == before


def test_two_processes_give_the_scores_of_one(work, tmp_path):
    predict_scores(work / "run/checkpoint", work / "session", out=tmp_path / "one", **SMALL)
    command = ["predict", str(work / "run/checkpoint"), str(work / "session"), "--out", str(tmp_path / "two")]
    result = CliRunner().invoke(cli, [*command, "--nproc", "2", "--rows-per-part", "330", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_rows"] == len(read_scores(tmp_path / "one"))
    one, two = (read_scores(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    np.testing.assert_allclose([row[2] for row in one.values()], [row[2] for row in two.values()], atol=1e-6)


def test_shares_fill_one_folder_and_the_last_one_says_that_it_is_complete(work, tmp_path, expected):
    out, flags = tmp_path / "scores", ["--rows-per-part", "330", "--json"]
    command = ["predict", str(work / "run/checkpoint"), str(work / "session"), "--out", str(out), *flags]
    (tmp_path / "scores").mkdir()
    (out / ".part-00001.parquet.7.tmp").write_bytes(b"PAR1")  # what the other share is writing
    first = CliRunner().invoke(cli, [*command, "--share", "0/2"], catch_exceptions=False)
    told = json.loads(first.stdout)
    assert 0 < told["missing"] < len(expected)
    assert (out / ".part-00001.parquet.7.tmp").exists()
    assert not (out / "scores.json").exists()
    second = CliRunner().invoke(cli, [*command, "--share", "1/2"], catch_exceptions=False)
    assert json.loads(second.stdout)["num_rows"] == len(expected) > told["num_rows"]
    assert by_key(read_scores(out)).keys() == expected.keys()
    for wrong in ("2/2", "1", "a/b"):
        with pytest.raises(InputError, match="expected INDEX/COUNT"):
            predict_scores(work / "run/checkpoint", work / "session", out=tmp_path / "other", share=wrong)


def test_what_does_not_fit_is_one_sentence(work, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("dear")
    model, data = work / "run/checkpoint", work / "session"
    with pytest.raises(InputError, match=r"holds no job\.json"):
        predict_scores(model, data, out=tmp_path / "mine")
    with pytest.raises(InputError, match=r"is no model: it holds neither checkpoint\.json"):
        predict_scores(data, data, out=tmp_path / "a")
    predict_scores(model, data, out=tmp_path / "a", split="test")
    with pytest.raises(InputError, match=r"holds scores of .*checkpoint for .*session \(split test\)"):
        predict_scores(model, data, out=tmp_path / "a")
    schema = json.loads((work / "raw/schema.json").read_text())
    schema["features"] = [entry | ({"dim": 4} if entry["kind"] != "dense" else {}) for entry in schema["features"]]
    (tmp_path / "log").mkdir()
    for path in (work / "raw").glob("*.parquet"):
        os.link(path, tmp_path / "log" / path.name)
    (tmp_path / "log/schema.json").write_text(json.dumps(schema))
    with pytest.raises(InputError, match=r"has dim 4, .*checkpoint was trained with"):
        predict_scores(model, tmp_path / "log", out=tmp_path / "b")
    with pytest.raises(InputError, match="--nproc is 0"):
        predict_scores(model, data, out=tmp_path / "c", nproc=0)


@pytest.mark.slow  # loads TorchRec a dozen times
def test_processes_that_are_killed_at_random_points_leave_nothing_twice(work, tmp_path, expected):
    draw = random.Random(5)
    command = [sys.executable, "-m", "recmill", "predict", str(work / "run/checkpoint"), str(work / "session")]
    command += ["--out", str(tmp_path / "scores"), "--nproc", "2", "--rows-per-part", "130"]
    for _ in range(6):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        deadline, num_parts = time.monotonic() + 120, len(list((tmp_path / "scores").glob("part-*.parquet")))
        while len(list((tmp_path / "scores").glob("part-*.parquet"))) == num_parts and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.002)
        time.sleep(draw.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = by_key(read_scores(tmp_path / "scores"))
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[key] for key in expected], list(expected.values()), atol=2e-6)
