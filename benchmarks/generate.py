"""How many samples per second `recmill generate` writes.

    python benchmarks/generate.py [--quick] [--json PATH|-] [--seed K]

Wall-clock rates of whole logs, from the first random number to the finished file, and rates per CPU second, which a
busy machine hardly changes. Peak memory is that of the whole process.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from harness import Metric, finish, parse_options, plain_value, warn_if_busy

from recmill.data.schema import Schema
from recmill.data.sources import synthetic_config
from recmill.data.sources.synthetic.generator import generate_log

SESSIONS = {"tiny": 3_000, "small": 20_000, "recd": 6_000}
SIZES = {"tiny": (100, 1), "quick": (4, 3), "full": (1, 7)}  # divisor of the number of sessions, repeats


def measure(preset: str, *, sessions: int, repeats: int, seed: int) -> dict[str, Metric]:
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
    note = f"{sessions} sessions, written to disk"
    return {
        f"{preset}_samples_per_s": plain_value(wall, unit="samples/s", note=note),
        f"{preset}_samples_per_cpu_s": plain_value(cpu, unit="samples/CPU s", note="both threads together"),
    }


def main() -> None:
    options = parse_options(__doc__, quick="a quarter of the sessions, 3 repeats instead of 7")
    warn_if_busy()
    divisor, repeats = SIZES[options.size]
    metrics: dict[str, Metric] = {}
    for preset, sessions in SESSIONS.items():
        metrics |= measure(preset, sessions=sessions // divisor, repeats=repeats, seed=options.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    metrics["peak_memory"] = plain_value([peak], unit="bytes")
    finish(options, metrics)


if __name__ == "__main__":
    main()
