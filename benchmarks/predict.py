"""How fast `recmill predict` scores rows, against the batches and the model of `recmill evaluate` without its metrics.

    python benchmarks/predict.py [--quick] [--json PATH|-] [--seed K]

Both load the model, read all rows of a dataset in layout deduplicated, and compute their scores in one process;
`recmill predict` also writes them. Pairs alternate; the ratio is the mean over pairs with its 95% interval.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
from harness import Metric, compare, finish, in_turns, parse_options, say, warn_if_busy

from recmill.data.cluster import cluster_sessions
from recmill.data.ingest import IngestPipeline
from recmill.data.sources.raw_log import make_raw_log
from recmill.training.checkpoint import load_trained_model
from recmill.training.config import TrainConfig
from recmill.training.evaluation import PredictionCollector
from recmill.training.prediction.predictor import predict_scores
from recmill.training.serving import EVALUATION_BATCH
from recmill.training.trainer import train

PAIRS = {"tiny": 2, "quick": 3, "full": 9}
# Metric: preset, sessions per size, encoder of sequences.
CASES = {
    "pooled": ("small", {"tiny": 200, "quick": 20_000, "full": 125_000}, "mean"),
    "transformer": ("recd", {"tiny": 30, "quick": 2_000, "full": 12_000}, "transformer"),
}


def evaluate_rows(checkpoint: Path, data: Path) -> None:
    """What `recmill evaluate` does before it measures."""
    model, _ = load_trained_model(checkpoint)
    reader = IngestPipeline(data, split="all", batch_size=EVALUATION_BATCH, shuffle=False, keeps_sessions=True)
    collector = PredictionCollector(labels=reader.schema.labels)
    with torch.no_grad(), reader as batches:
        for batch in batches:
            collector.add(batch, model(batch.dense_BF, batch.ids))
    collector.gather()


def measure(folder: Path, case: str, size: str, seed: int) -> Metric:
    preset, sessions, encoder = CASES[case]
    raw, data, run = (folder / f"{case}-{name}" for name in ("raw", "data", "run"))
    make_raw_log(preset, out=raw, overrides={"sessions": sessions[size], "seed": seed})
    num_rows = cluster_sessions(raw, out=data, layout="deduplicated", eval_fraction=0.1).num_rows
    config = TrainConfig(sequence_encoder=encoder, max_steps=5, tuning="false", hot_batches="false")
    train(data, out=run, config=config)
    checkpoint = run / "checkpoint"

    def evaluate() -> float:
        start = time.perf_counter()
        evaluate_rows(checkpoint, data)
        return num_rows / (time.perf_counter() - start)

    def predict() -> float:
        out = folder / "scores"
        start = time.perf_counter()
        predict_scores(checkpoint, data, out=out)
        seconds = time.perf_counter() - start
        shutil.rmtree(out)
        return num_rows / seconds

    theirs, ours = in_turns(evaluate, predict, repeats=PAIRS[size], warm_ups=0 if size == "tiny" else 1)
    say(f"{case}: evaluate {theirs[-1]:,.0f}, predict {ours[-1]:,.0f} rows/s")
    note = f"preset {preset}, {num_rows:,} rows; baseline: reading and scoring of recmill evaluate"
    return compare(theirs, ours, unit="rows/s", note=note)


def main() -> None:
    options = parse_options(__doc__, quick="a sixth of the rows, 3 pairs instead of 9")
    warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        metrics = {case: measure(Path(scratch), case, options.size, options.seed) for case in CASES}
    finish(options, metrics)


if __name__ == "__main__":
    main()
