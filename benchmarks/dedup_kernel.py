"""How fast `dedup_rows` reads ids on one core, against torch.unique(dim=0) on the same rows.

    python benchmarks/dedup_kernel.py [--quick] [--json PATH|-] [--seed K]

Rows are lists of 64 int64 ids: clustered (8 equal rows after another, as cluster_sessions leaves them), shuffled (the
same rows in random order) and distinct (no row twice). Both sides run on one thread, in turns, each after one call
that is not timed: in the reader the lists were decoded a moment before and lie in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from kernels import dedup_rows, take_rows, window_rows

LENGTH, COPIES = 64, 8


def make_rows(shape: str, num_rows: int, generator: torch.Generator) -> Tensor:
    num_distinct = num_rows if shape == "distinct" else num_rows // COPIES
    base = torch.randint(1_000_000, (num_distinct, LENGTH), generator=generator)
    picks = torch.arange(num_rows) if shape == "distinct" else torch.arange(num_rows) // COPIES
    if shape == "shuffled":
        picks = picks[torch.randperm(num_rows, generator=generator)]
    return base[picks]


def make_histories(num_rows: int, generator: torch.Generator) -> Tensor:
    """Sessions of 8 rows whose list moves on by one id every time."""
    stream = torch.randint(1_000_000, (num_rows // COPIES, LENGTH + COPIES), generator=generator)
    return stream.unfold(1, LENGTH, 1)[:, :COPIES].reshape(-1, LENGTH).contiguous()


Seconds = tuple[list[float], list[float]]


def measure(baseline: Callable[[], object], ours: Callable[[], object], repeats: int) -> Seconds:
    """Seconds of both, in turns, so that a busy machine slows both."""
    seconds: Seconds = ([], [])
    for _ in range(repeats):
        for side, run in enumerate((baseline, ours)):
            run()
            start = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - start)
    return seconds


def describe(num_bytes: int, baseline_s: list[float], ours_s: list[float], note: str) -> dict[str, object]:
    rates = [[num_bytes / 1e9 / second for second in side] for side in (baseline_s, ours_s)]
    baseline, ours = (statistics.median(side) for side in rates)
    spread = {"baseline": [min(rates[0]), max(rates[0])], "ours": [min(rates[1]), max(rates[1])]}
    shown = {"unit": "GB/s", "note": note}
    return {"baseline": baseline, "ours": ours, "ratio": ours / baseline, "spread": spread, **shown}


def run(quick: bool, seed: int) -> dict[str, dict[str, object]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    num_rows, repeats = (8192, 5) if quick else (16384, 21)
    offsets = torch.arange(num_rows + 1) * LENGTH
    metrics = {}
    for shape in ("clustered", "shuffled", "distinct"):
        rows = make_rows(shape, num_rows, generator)
        values = rows.reshape(-1)
        seconds = measure(
            lambda rows=rows: torch.unique(rows, dim=0, return_inverse=True),
            lambda values=values: dedup_rows([values], [offsets], num_threads=1),
            repeats,
        )
        metrics[f"dedup_{shape}"] = describe(rows.nbytes, *seconds, "dedup_rows against torch.unique(dim=0)")
    unique_rows, _ = dedup_rows([values], [offsets])
    unique_rows = unique_rows[torch.randperm(len(unique_rows), generator=generator)]
    seconds = measure(
        lambda: rows[unique_rows],
        lambda: take_rows([values], [offsets], unique_rows, num_threads=1),
        repeats,
    )
    metrics["take_rows"] = describe(rows.nbytes, *seconds, "jagged copy against dense indexing, which knows the length")
    histories = make_histories(num_rows, generator)
    seconds = measure(
        lambda: torch.unique(histories, dim=0, return_inverse=True),
        lambda: window_rows(histories.reshape(-1), offsets),
        repeats,
    )
    metrics["window_rows"] = describe(histories.nbytes, *seconds, "shifted lists, against torch.unique(dim=0)")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8,192 rows and 5 repeats instead of 16,384 and 21")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    metrics = run(arguments.quick, arguments.seed)
    table = sys.stderr if arguments.json == "-" else sys.stdout
    print(f"{'':18}{'baseline GB/s':>15}{'ours GB/s':>12}{'ratio':>9}", file=table)
    for name, metric in metrics.items():
        print(f"{name:18}{metric['baseline']:15.2f}{metric['ours']:12.2f}{metric['ratio']:8.1f}x", file=table)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        result = {
            "benchmark": "dedup_kernel",
            "quick": arguments.quick,
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "metrics": metrics,
            "skipped": {},
        }
        text = json.dumps(result, indent=2)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
