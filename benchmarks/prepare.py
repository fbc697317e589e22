"""How fast `recmill prepare` makes samples, against the same work in plain DuckDB SQL and in pandas.

    python benchmarks/prepare.py [--quick] [--json PATH|-] [--seed K]

Events with text ids, two side tables, sessions, histories of the last 50 products and one negative each; every side
runs in a process of its own. SQL and pandas may use all memory; recmill keeps its limit. The rivals do less: they drop
a negative that hits a positive, and look no further back than rows with equal times in any order.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from harness import compare, finish, in_turns, parse_options, plain_value, say, warn_if_busy
from prepare_rivals import measure, write_shop

# Events in all, events of the comparison with rivals, turns.
SIZES = {"tiny": (3_000, 2_000, 1), "quick": (1_000_000, 300_000, 3), "full": (10_000_000, 1_000_000, 5)}
MEMORY_LIMIT_BYTES = 2 * 10**9
TARGET = "at least 300,000"


def run(side: str, folder: Path) -> dict[str, Any]:
    """One side in a fresh process."""
    out = folder / f"out-{side}"
    shutil.rmtree(out, ignore_errors=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[str, Any] = pool.submit(measure, side, str(folder), str(out), MEMORY_LIMIT_BYTES).result()
    say(f"{side}: {found['rows']:,} rows in {found['seconds']:.1f} s, {found['peak_bytes'] / 1e6:,.0f} MB")
    shutil.rmtree(out, ignore_errors=True)
    return found


def main() -> None:
    options = parse_options(__doc__, quick="a tenth of the events, 3 turns instead of 5")
    warn_if_busy()
    num_events, num_compared, turns = SIZES[options.size]
    metrics = {}
    with tempfile.TemporaryDirectory() as scratch:
        whole, small = Path(scratch) / "whole", Path(scratch) / "small"
        for folder, number in ((whole, num_events), (small, num_compared)):
            folder.mkdir()
            write_shop(folder, number, seed=options.seed)
        found = [run("ours", whole) for _ in range(turns)]
        note = f"{num_events:,} events, two side tables, histories of 50, one negative each"
        rates = [own["rows"] / own["seconds"] for own in found]
        metrics["samples_per_s"] = plain_value(rates, unit="samples/s", note=f"{note}; {TARGET}")
        cpu = [own["rows"] / own["cpu_seconds"] for own in found]
        metrics["samples_per_cpu_s"] = plain_value(cpu, unit="samples/CPU s", note="all threads together")
        peaks = [own["peak_bytes"] for own in found]
        metrics["peak_memory"] = plain_value(peaks, unit="bytes", note=f"limit {MEMORY_LIMIT_BYTES:,} bytes")

        def rate(side: str) -> float:
            own = run(side, small)
            return float(own["rows"] / own["seconds"])

        for rival in ("duckdb", "pandas"):
            theirs, ours = in_turns(lambda side=rival: rate(side), lambda: rate("ours"), repeats=turns)
            about = f"{num_compared:,} events, against {'plain DuckDB SQL' if rival == 'duckdb' else 'pandas'}"
            metrics[f"rate_vs_{rival}"] = compare(theirs, ours, unit="samples/s", note=about)
    finish(options, metrics)


if __name__ == "__main__":
    main()
