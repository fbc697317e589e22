"""The ratios of benchmarks/recd.py over samples per session: its full form runs all points, this script some of them.

python benchmarks/recd_curve.py [--rows N] [--sequence-rows N] [--seed K] [SAMPLES ...]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.training.processes import rank_environment

os.environ.update(rank_environment())  # before any library reads it: thread and memory settings as in training

from harness import say
from recd_measures import (
    bytes_per_sample,
    make_trainers,
    measure_preprocessing,
    measure_storage,
    measure_training,
    quieten,
)
from recd_sizes import SIZES, Sizes
from session_logs import SAMPLES_PER_SESSION, Logs
from training_rate import one_rank

CURVE = (1.0, 2.0, 4.0, 8.0, SAMPLES_PER_SESSION)


def run_curve(logs: Logs, sizes: Sizes, seed: int, points: Sequence[float] = CURVE) -> list[dict[str, Any]]:
    """The ratios at other numbers of samples per session, each from fewer repeats."""
    sizes = replace(sizes, repeats=1)
    curve = []
    for samples in points:
        say(f"{samples} samples per session")
        main, short = (logs.recd(rows, samples) for rows in (sizes.rows // 4, sizes.sequence_rows // 2))
        pooled = make_trainers(main, "mean", sizes, seed)
        sequence = make_trainers(short, "transformer", sizes, seed, batch_size=sizes.sequence_batch_size)
        session, deduplicated = measure_storage(main, "session", "deduplicated")
        metrics = {
            "storage_session": session,
            "storage_deduplicated": deduplicated,
            "preprocess": measure_preprocessing(main, sizes, seed, repeats=5),
            "train_pooled": measure_training(main, pooled, repeats=3, num_steps=1),
            "train_sequence": measure_training(short, sequence, repeats=3, num_steps=1),
        }
        ratios = {name: metric["ratio"] for name, metric in metrics.items()}
        for name, metric in metrics.items():
            lowest, highest = metric["spread"]["ratio"]
            sides = f"{metric['baseline']:,.0f} and {metric['ours']:,.0f} {metric['unit']}"
            say(f"  {name} {metric['ratio']:.2f}x ({lowest:.2f} to {highest:.2f}): {sides}")
        curve.append(
            {"samples_per_session": samples, **ratios, "bytes_per_sample": bytes_per_sample(main, sizes, seed)}
        )
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=float, nargs="*", default=list(CURVE), help="samples per session")
    parser.add_argument(
        "--rows", type=int, default=SIZES["full"].rows // 4, help="rows of the log trained with the pooled model"
    )
    parser.add_argument("--sequence-rows", type=int, default=SIZES["full"].sequence_rows // 2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    quieten()
    sizes = replace(SIZES["full"], rows=4 * given.rows, sequence_rows=2 * given.sequence_rows)
    with tempfile.TemporaryDirectory(prefix="recd-") as folder, one_rank():
        for point in run_curve(Logs(Path(folder), given.seed), sizes, given.seed, given.samples):
            print(json.dumps(point))


if __name__ == "__main__":
    main()
