"""The pipelines with loops, run whole on this machine by kfp's local runner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.ablations import VARIANTS, build_ablations
from pipelines.local import run_locally
from pipelines.train import STEPS, build_partitioned_pipeline
from recmill.artifacts import Dataset, read_json

SETTINGS = {"batch_size": "128", "max_steps": "4", "bottom_layers": "16", "top_layers": "16", "threads": "1"}


def run(pipeline: object, folder: Path, settings: Mapping[str, str] = {}, **arguments: object) -> None:
    run_locally(
        pipeline,
        {"workdir": str(folder / "run"), "settings": json.dumps(SETTINGS | settings), **arguments},
        steps=(*STEPS, "merge_data", "compare_runs"),
        log_path=folder / "log.txt",
        environment={"RECMILL_TRACKING": "off", "OMP_NUM_THREADS": "1"},
        follow=lambda step, text: None,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ablations_train_the_same_data_and_are_compared(tmp_path: Path) -> None:
    run(build_ablations(), tmp_path, {"data.sessions": "80"})
    comparison = (tmp_path / "run" / "comparison.html").read_text(encoding="utf-8")
    results = {}
    for variant in VARIANTS:
        results[variant["name"]] = read_json(
            tmp_path / "run" / "ablations" / str(variant["name"]) / "train/result.json"
        )
        assert str(variant["name"]) in comparison
    assert len({result["data"]["content_hash"] for result in results.values()}) == 1
    assert results["baseline"]["config"]["dedup"] == "false"
    metrics = read_json(tmp_path / "run" / "steps" / "compare_runs.json")["metrics"]
    assert {f"samples_per_s_{str(variant['name']).removeprefix('+')}" for variant in VARIANTS} <= set(metrics)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_partitions_are_clustered_apart_and_trained_together(tmp_path: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from recmill.data.sources import make_raw_log

    partitions = []
    for day in range(2):
        raw = make_raw_log("tiny", out=str(tmp_path / f"raw-{day}"), overrides={"sessions": "60", "seed": str(day)})
        for file in Path(raw).glob("*.parquet"):
            table = pq.read_table(file)
            moved = pc.add(table["session_id"], day * 1_000_000)
            pq.write_table(table.set_column(table.column_names.index("session_id"), "session_id", moved), file)
        partitions.append({"name": f"day-{day}", "data": str(tmp_path / f"raw-{day}")})
    run(build_partitioned_pipeline(), tmp_path, partitions=partitions)
    dataset = Dataset.load(tmp_path / "run" / "dataset")
    parts = [Dataset.load(tmp_path / "run/partitions" / f"day-{day}" / "dataset") for day in range(2)]
    assert dataset.num_rows == sum(part.num_rows for part in parts)
    assert (tmp_path / "run" / "report.html").exists()
