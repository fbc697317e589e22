"""How many samples a second `recmill generate` writes.

    python benchmarks/generate.py [--quick] [--json PATH|-] [--seed K]

Wall-clock rates of whole logs, from the first random number to the file in place, and rates per CPU second, which a
busy machine changes little. Peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recmill.data.schema import Schema
from recmill.data.sources import generate_log, synthetic_config

SESSIONS = {"tiny": 3_000, "small": 20_000, "recd": 6_000}


def measure(preset: str, *, sessions: int, repeats: int, seed: int) -> dict[str, dict[str, Any]]:
    wall, cpu = [], []
    for repeat in range(repeats):
        config = synthetic_config(preset, sessions=sessions, seed=seed + repeat)
        with tempfile.TemporaryDirectory() as scratch:
            started = time.perf_counter(), time.process_time()
            log = generate_log(config, out=Path(scratch) / "log")
            seconds = time.perf_counter() - started[0], time.process_time() - started[1]
            num_samples = Schema.load(log).info["num_samples"]
        wall.append(num_samples / seconds[0])
        cpu.append(num_samples / seconds[1])
    shared = {"baseline": None, "ratio": None}
    return {
        f"{preset}_samples_per_s": {
            **shared,
            "ours": statistics.median(wall),
            "spread": [min(wall), max(wall)],
            "unit": "samples/s",
            "note": f"{sessions} sessions, written to disk",
        },
        f"{preset}_samples_per_cpu_s": {
            **shared,
            "ours": statistics.median(cpu),
            "spread": [min(cpu), max(cpu)],
            "unit": "samples/CPU s",
            "note": "both threads together",
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the sessions, 3 repeats instead of 7")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    metrics: dict[str, dict[str, Any]] = {}
    for preset, sessions in SESSIONS.items():
        sessions = sessions // 4 if arguments.quick else sessions
        metrics |= measure(preset, sessions=sessions, repeats=3 if arguments.quick else 7, seed=arguments.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    metrics["peak_memory"] = {
        "baseline": None,
        "ours": peak,
        "ratio": None,
        "spread": None,
        "unit": "bytes",
        "note": "",
    }
    table = sys.stderr if arguments.json == "-" else sys.stdout
    for name, metric in metrics.items():
        print(f"{name:28}{metric['ours']:>16,.0f} {metric['unit']}", file=table)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        result = {
            "benchmark": "generate",
            "quick": arguments.quick,
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
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
