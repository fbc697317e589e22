import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Dataset, InputError, WorkerAllocation
from recmill.artifacts.allocation import StageTime
from recmill.cli import main
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.schema import Feature, Schema
from recmill.tuning.allocation import split_evenly, tune_ingest
from recmill.tuning.cores import available_cores
from recmill.tuning.simulation.stage_times import measure_stages

SCHEMA = Schema(
    features=(Feature(name="x", kind="dense"), Feature(name="item", kind="sparse", num_rows=1_000, dim=4)),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """One part with a single row group: too little to hold anything out, enough to be measured."""
    folder = tmp_path_factory.mktemp("tuning") / "dataset"
    folder.mkdir()
    SCHEMA.save(folder)
    rows = np.arange(500)
    table = pa.table(
        {
            "session_id": rows,
            "timestamp": rows,
            "label": (rows % 2).astype(np.float32),
            "x": rows.astype(np.float32),
            "item": pa.array([[int(row)] for row in rows], type=pa.list_(pa.int64())),
        },
        schema=SCHEMA.arrow_schema(),
    )
    pq.write_table(table, folder / "part-00000.parquet")
    part = {
        "file": "part-00000.parquet",
        "split": "train",
        "num_rows": 500,
        "num_sessions": 500,
        "bytes": (folder / "part-00000.parquet").stat().st_size,
        "row_group_rows": [500],
    }
    body = {"layout": "session", "num_rows": 500, "num_sessions": 500, "source": {}, "parts": [part]}
    Dataset.of_json(body).seal(folder)
    return Dataset.load(folder)


def times(**cpu_seconds: float) -> dict[str, StageTime]:
    return {stage: StageTime(seconds=cpu_seconds[stage], cpu_seconds=cpu_seconds[stage]) for stage in STAGES}


SKEWED = times(read=1.0, decode=9.0, transform=3.0, batch=2.0)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, {"read": 1, "decode": 1, "transform": 1, "batch": 1}),
        (3, {"read": 1, "decode": 1, "transform": 1, "batch": 1}),
        (4, {"read": 1, "decode": 1, "transform": 1, "batch": 1}),
        (6, {"read": 1, "decode": 2, "transform": 2, "batch": 1}),
        (8, {"read": 2, "decode": 2, "transform": 2, "batch": 2}),
        (11, {"read": 2, "decode": 3, "transform": 3, "batch": 3}),
    ],
)
def test_the_even_split_uses_every_core_and_leaves_no_stage_without(cores, expected):
    assert split_evenly(cores, SKEWED) == expected


def test_stages_are_timed_on_real_row_groups(dataset):
    measured = measure_stages(dataset, batch_size=64)
    assert set(measured) == set(STAGES)
    assert all(taken.seconds > 0 for taken in measured.values())


def test_the_allocation_records_what_was_measured(dataset, tmp_path):
    calls = []
    allocation = tune_ingest(
        dataset,
        out=tmp_path / "allocation",
        cores=8,
        memory_limit_bytes=10**8,
        batch_size=64,
        seconds=4,
        progress=lambda what, done, total: calls.append((what, done, total)),
    )
    candidates = allocation.candidates
    assert set(candidates) == {"one worker per stage", "even split", "linear programme", "agent"}
    assert candidates["even split"].stages == dict.fromkeys(STAGES, 2)
    assert allocation.stages == candidates[allocation.controller].stages
    assert allocation.rows_per_s >= 0.97 * max(found.rows_per_s for found in candidates.values())
    assert allocation.history[0].workers == dict.fromkeys(STAGES, 1)
    assert (tmp_path / "allocation" / allocation.agent).is_file()
    assert allocation.inputs == {"dataset": dataset.content_hash}
    assert allocation.rows_per_s > 0
    assert 0 < allocation.memory_bytes <= 10**8
    assert allocation.baseline.stages == dict.fromkeys(STAGES, 1)
    assert allocation.baseline.rows_per_s > 0
    assert set(allocation.stage_times) == set(STAGES)
    num_different = len({tuple(sorted(found.stages.items())) for found in candidates.values()})
    num_measured = 3 * num_different  # three turns, each different allocation once a turn
    assert calls[-1] == ("measure allocations", num_measured, num_measured)
    assert {what for what, _, _ in calls} >= {"time stages", "tune a running pipeline"}
    loaded = WorkerAllocation.load(tmp_path / "allocation", verify=True)
    with IngestPipeline(dataset, split="all", batch_size=64, workers=loaded.stages) as pipeline:
        assert sum(map(len, pipeline)) == 500


def test_a_limit_that_is_too_small_leaves_no_output(dataset, tmp_path):
    with pytest.raises(InputError, match="memory limit of 100 bytes is too small"):
        tune_ingest(dataset, out=tmp_path / "allocation", memory_limit_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_no_cores_is_refused(dataset, tmp_path):
    with pytest.raises(InputError, match="cores is 0, expected at least 1"):
        tune_ingest(dataset, out=tmp_path / "allocation", cores=0)


def test_no_time_is_refused(dataset, tmp_path):
    with pytest.raises(InputError, match="seconds is 0, expected more than 0"):
        tune_ingest(dataset, out=tmp_path / "allocation", seconds=0)


def test_a_cpu_quota_bounds_the_cores(tmp_path):
    unlimited = available_cores(tmp_path)
    assert unlimited >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == unlimited
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert available_cores(tmp_path) == 1


def test_tune_prints_one_json_object(dataset, tmp_path, capsys):
    out = tmp_path / "allocation"
    with pytest.raises(SystemExit) as ended:
        main(
            ["tune", dataset.path, "--out", str(out), "--cores", "2", "--batch-size", "64", "--seconds", "2", "--json"]
        )
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["stages"]) == set(STAGES)
    assert printed["content_hash"] == WorkerAllocation.load(out).content_hash


def test_tune_says_what_is_wrong_and_exits_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(tmp_path / "nowhere"), "--out", str(tmp_path / "allocation")])
    assert ended.value.code == 2
    assert "no such folder; expected a dataset" in capsys.readouterr().err
