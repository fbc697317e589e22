"""Run folders for the tests of the report, written in the formats the steps write."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts import AccessProfile, Dataset, WorkerAllocation, dump_record, write_folder
from recmill.artifacts.allocation import Throughput
from recmill.artifacts.profile import CurvePoint, FeatureDuplication, TableProfile
from recmill.artifacts.topology import Topology
from recmill.data.schema import Feature, Schema
from recmill.planning.planner import default_plan
from recmill.training.config import TrainConfig

STARTED_AT = 1_790_000_000.0
STEP_SECONDS = {
    "generate_data": 21.4,
    "profile_access": 3.2,
    "plan_shards": 4.9,
    "tune_ingest": 6.7,
    "train_model": 48.3,
}
NUM_ROWS, NUM_SESSIONS = 400_000, 51_300


def small_schema(extra: tuple[Feature, ...] = ()) -> Schema:
    features = (
        Feature(name="price", kind="dense"),
        Feature(name="hour", kind="dense"),
        Feature(name="user_id", kind="sparse", num_rows=200_000, dim=16, group="user"),
        Feature(name="user_interests", kind="sparse", num_rows=5_000, dim=16, group="user", pooling="mean"),
        Feature(name="item_id", kind="sparse", table="items", num_rows=80_000, dim=16),
        Feature(name="history", kind="sequence", table="items", num_rows=80_000, dim=16, shift=True),
        Feature(name="category", kind="sparse", num_rows=600, dim=16),
    )
    info = {"source": "synthetic", "preset": "tiny", "best_auc": 0.8123, "base_rate": 0.21, "zipf": 1.1, "seed": 0}
    return Schema(features=features + extra, info=info)


def write_run(
    path: Path,
    *,
    name: str | None = None,
    speed: float = 1.0,
    auc: float = 0.7934,
    num_steps: int = 195,
    **options: Any,
) -> Path:
    """A whole run. `speed` makes training that much faster; `extra` adds features; `config` changes settings."""
    schema = small_schema(options.get("extra", ()))
    write_dataset(path / "dataset", schema, data_bytes=options.get("data_bytes", 38_400_000))
    write_profile(path / "profile", schema)
    write_plan(path / "plan", schema)
    write_allocation(path / "allocation")
    seconds = STEP_SECONDS | {"train_model": STEP_SECONDS["train_model"] / speed}
    write_training(path / "train", speed=speed, auc=auc, num_steps=num_steps, config=options.get("config", {}))
    write_steps(path / "steps", seconds, speed=speed)
    run = {
        "format_version": 1,
        "kind": "run",
        "name": name or path.name,
        "preset": "tiny",
        "arguments": {"preset": "tiny", "layout": "session", "nproc": 2, "eval_fraction": 0.1},
        "pipeline_run_id": "8f1c7a52",
        "mlflow": {"tracking_uri": "sqlite:///mlflow.db", "experiment_id": "1", "run_id": "0c9be1d3a4"},
        "started_at": STARTED_AT,
        "seconds": sum(seconds.values()) + 6.5,
    }
    write_json(path / "run.json", run)
    return path


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_record(value))


def write_dataset(path: Path, schema: Schema, *, data_bytes: int) -> None:
    parts = [
        {
            "file": f"part-{n:05}.parquet",
            "split": split,
            "num_rows": rows,
            "num_sessions": sessions,
            "bytes": size,
            "row_group_rows": [rows],
        }
        for n, (split, rows, sessions, size) in enumerate(
            [
                ("train", 360_000, 46_170, data_bytes * 9 // 10),
                ("test", 40_000, 5_130, data_bytes - data_bytes * 9 // 10),
            ]
        )
    ]
    body = {
        "layout": "session",
        "num_rows": NUM_ROWS,
        "num_sessions": NUM_SESSIONS,
        "parts": parts,
        "source": {"engine": "duckdb"},
    }
    with write_folder(path, manifest_name="dataset.json") as folder:
        schema.save(folder)
        Dataset.of_json(body).seal(folder)


def write_profile(path: Path, schema: Schema) -> None:
    tables = {}
    for position, table in enumerate(schema.tables):
        weights = 1 / np.arange(1, table.num_rows + 1) ** (1.25 - 0.12 * position)
        cumulative = np.cumsum(weights) / weights.sum()
        rows = sorted({round(10**exponent) for exponent in np.linspace(0, math.log10(table.num_rows), 40)})
        tables[table.name] = TableProfile(
            num_rows=table.num_rows,
            dim=table.dim,
            features=table.features,
            num_accesses=NUM_ROWS * (12 if table.name == "items" else 1),
            num_distinct=table.num_rows * 7 // 10,
            top_share={
                share: float(cumulative[math.ceil(float(share) * table.num_rows) - 1])
                for share in ("0.001", "0.01", "0.1")
            },
            zipf_exponent=1.25 - 0.12 * position,
            curve=tuple(CurvePoint(rows=row, share=float(cumulative[row - 1])) for row in rows),
            drift=None,
        )
    duplication = {
        feature.name: FeatureDuplication(
            kind=feature.kind,
            mean_length=20.0 if feature.kind == "sequence" else 1.0,
            samples_per_session=7.8,
            same_as_previous=0.87 if feature.group == "user" else 0.04,
            shifted_by_one=0.81 if feature.shift else 0.0,
            distinct_per_session=1.22 if feature.group == "user" else 7.4,
            dedup_factor=6.4 if feature.group == "user" else 1.05,
            batch_dedup_factor={1024: 5.9, 4096: 6.1, 16384: 6.3},
        )
        for feature in schema.features
    }
    with write_folder(path, manifest_name="profile.json") as folder:
        AccessProfile(
            num_samples=360_000,
            num_samples_total=360_000,
            split="train",
            layout="session",
            confidence=None,
            tables=tables,
            duplication=duplication,
        ).seal(folder)


def write_plan(path: Path, schema: Schema) -> None:
    plan = default_plan(schema, Topology(nodes=1, ranks_per_node=2))
    tables = {}
    for table in schema.tables:
        whole = replace(
            plan.tables[table.name].tiers[0], predicted_bytes_per_step=262_144.0, predicted_seconds_per_step=0.00042
        )
        tiers = (whole,)
        if table.name == "items":
            hot = replace(whole, kind="replicated", num_rows=4_000, bytes=4_000 * 68)
            tiers = (hot, replace(whole, kind="global", num_rows=76_000, bytes=76_000 * 68))
        tables[table.name] = replace(plan.tables[table.name], tiers=tiers)
    with write_folder(path, manifest_name="plan.json") as folder:
        replace(
            plan,
            tables=tables,
            memory_budget_bytes=64 * 2**20,
            rank_bytes=(14_000_000, 5_780_000),
            solver="torchrec",
            objective=0.00131,
            bound=None,
            gap=None,
        ).seal(folder)


def write_allocation(path: Path) -> None:
    stages = {"read": 1, "decode": 2, "transform": 3, "batch": 1}
    baseline = Throughput(stages=dict.fromkeys(stages, 1), rows_per_s=388_000.0, memory_bytes=290_000_000)
    allocation = WorkerAllocation(
        stages=stages,
        rows_per_s=512_000.0,
        memory_bytes=310_000_000,
        baseline=baseline,
        agent=None,
    )
    with write_folder(path, manifest_name="allocation.json") as folder:
        allocation.seal(folder)


def write_training(path: Path, *, speed: float, auc: float, num_steps: int, config: dict[str, Any]) -> None:
    noise = np.random.default_rng(round(auc * 10**4)).normal(0, 0.006, num_steps)
    samples_per_s = 8_000.0 * speed
    curve = [
        {
            "step": step,
            "samples": step * 2048,
            "seconds": step * 2048 / samples_per_s,
            "loss": 1.23 - auc + 0.2 * math.exp(-4 * step / num_steps) + noise[step - 1],
        }
        for step in range(1, num_steps + 1)
    ]
    evaluations = [
        {
            "step": num_steps * part // 5,
            "epoch": 0,
            "auc": auc - 0.16 * math.exp(-part),
            "log_loss": 0.47,
            "normalised_entropy": 0.86,
        }
        for part in range(1, 6)
    ]
    false_positives = [position / 200 for position in range(201)]
    result = {
        "format_version": 1,
        "kind": "training",
        "config": TrainConfig().to_json() | config,
        "world_size": 2,
        "num_steps": num_steps,
        "num_samples": 360_000,
        "seconds": 360_000 / samples_per_s,
        "samples_per_s": samples_per_s,
        "peak_memory_bytes": 612_000_000,
        "metrics": {"auc": auc, "log_loss": 0.4412, "normalised_entropy": 0.8391, "num_samples": 40_000, **quality()},
        "curve": curve,
        "evaluations": evaluations,
        "roc": {
            "fpr": false_positives,
            "tpr": [rate ** (1 / auc - 1) for rate in false_positives],
            "threshold": [1 - rate for rate in false_positives],
        },
        "ingest": ingest_statistics(seconds=360_000 / samples_per_s),
        "model": {
            "name": "dlrm",
            "num_dense_parameters": 182_401,
            "num_embedding_parameters": 4_569_600,
            "embedding_bytes": 18_278_400,
        },
        "data": {"path": "dataset", "layout": "session", "content_hash": "sha256:9f2b61"},
    }
    write_json(path / "result.json", result)


def write_steps(path: Path, seconds: dict[str, float], *, speed: float) -> None:
    metrics = {
        "generate_data": {"rows_per_s": 184_000.0, "data_bytes": 38_400_000, "num_rows": NUM_ROWS},
        "profile_access": {"num_samples": 360_000},
        "plan_shards": {"num_tables": 4, "largest_rank_bytes": 14_000_000},
        "tune_ingest": {"rows_per_s": 512_000.0},
        "train_model": {"auc": 0.79, "samples_per_s": 8_000.0 * speed, "embedding_bytes": 18_278_400},
    }
    start = STARTED_AT
    for step, taken in seconds.items():
        record = {
            "step": step,
            "started_at": start,
            "seconds": taken,
            "metrics": metrics[step],
            "inputs": {},
            "outputs": {},
        }
        write_json(path / f"{step}.json", record)
        start += taken


def ingest_statistics(*, seconds: float) -> dict[str, Any]:
    stages = {"read": (1, 0.31), "decode": (2, 0.66), "transform": (3, 0.93), "batch": (1, 0.22)}
    consumer = {
        "batches": 176,
        "rows": 180_000,
        "rows_per_s": 180_000 / seconds,
        "seconds": seconds,
        "stall_seconds": 0.04 * seconds,
    }
    return {
        stage: {
            "workers": workers,
            "items": 44,
            "rows": 180_000,
            "bytes": 17_280_000,
            "seconds": busy * workers * seconds,
            "cpu_seconds": 0.9 * busy * workers * seconds,
            "seconds_per_item": busy * workers * seconds / 44,
            "rows_per_s": 180_000 / seconds,
            "busy_share": busy,
            "queue": 2,
            "queue_fill": 0.25,
        }
        for stage, (workers, busy) in stages.items()
    } | {
        "consumer": consumer | {"queue": 3, "queue_fill": 0.75},
        "memory": {"bytes": 9_000_000, "peak_bytes": 61_000_000, "limit_bytes": 512 * 2**20},
    }


def quality() -> dict[str, Any]:
    """The detailed metrics of a result."""
    slices = [
        {
            "feature": feature,
            "kind": kind,
            "low": low,
            "high": high,
            "num_samples": 1_000,
            "auc": 0.71,
            "log_loss": 0.5,
            "standard_errors": {"auc": 0.011, "log_loss": 0.012},
        }
        for feature in ("user_id", "item_id")
        for kind, low, high in (("new", 0, 1), ("rare", 1, 37), ("frequent", 37, None))
    ]
    return {
        "gauc": 0.6842,
        "ndcg_at_10": 0.5123,
        "recall_at_10": 0.8123,
        "mrr": 0.4444,
        "calibration": 1.0321,
        "ece": 0.0123,
        "standard_errors": {"auc": 0.0021, "gauc": 0.0034, "ndcg_at_10": 0.0045, "calibration": 0.0067},
        "groups": {
            "kind": "user",
            "num_groups": 3_000,
            "num_one_class": 250,
            "num_sessions": 5_000,
            "num_without_positive": 700,
        },
        "slices": slices,
        "reliability": [
            {"predicted": position / 20, "observed": position / 21, "num_samples": 2_000} for position in range(1, 21)
        ],
    }
