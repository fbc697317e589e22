"""How fast `recmill prepare` makes samples, against the same work in plain DuckDB SQL and in pandas.

    python benchmarks/prepare.py [--quick] [--json PATH|-] [--seed K]

Events with text ids, two side tables, sessions, histories of the last 50 products and one negative each; every side
runs in a process of its own, and loading its libraries counts. SQL and pandas may use all memory; recmill keeps its
limit. The rivals do less: they drop a negative that hits a positive, look no further back than rows with equal times in
any order, and check neither the data nor the samples. Pairs alternate; a ratio is the mean over pairs with its 95%
interval. `start_seconds` is a log of 1,000 events: what a run costs before events count.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from harness import compare, finish, in_turns, parse_options, plain_value, say, warn_if_busy
from prepare_rivals import measure, write_shop

# Events of our rate, turns of it, events of the comparisons with each rival, pairs of these.
SIZES: dict[str, tuple[int, int, dict[str, tuple[int, ...]], int]] = {
    "tiny": (3_000, 1, {"duckdb": (2_000,), "pandas": (2_000,)}, 2),
    "quick": (1_000_000, 3, {"duckdb": (300_000,), "pandas": (300_000,)}, 3),
    "full": (10_000_000, 5, {"duckdb": (300_000, 1_000_000, 10_000_000), "pandas": (1_000_000,)}, 9),
}
NUM_FEW = 1_000
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
    options = parse_options(__doc__, quick="a tenth of the events, 3 pairs instead of 9")
    warn_if_busy()
    num_events, turns, compared, pairs = SIZES[options.size]
    metrics = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in {NUM_FEW, num_events, *(own for sizes in compared.values() for own in sizes)}:
            Path(scratch, str(number)).mkdir()
            write_shop(Path(scratch, str(number)), number, seed=options.seed)
        found = [run("ours", Path(scratch, str(num_events))) for _ in range(turns)]
        note = f"{num_events:,} events, two side tables, histories of 50, one negative each"
        rates = [own["rows"] / own["seconds"] for own in found]
        metrics["samples_per_s"] = plain_value(rates, unit="samples/s", note=f"{note}; {TARGET}")
        cpu = [own["rows"] / own["cpu_seconds"] for own in found]
        metrics["samples_per_cpu_s"] = plain_value(cpu, unit="samples/CPU s", note="all threads together")
        peaks = [own["peak_bytes"] for own in found]
        metrics["peak_memory"] = plain_value(peaks, unit="bytes", note=f"limit {MEMORY_LIMIT_BYTES:,} bytes")

        started = [run("ours", Path(scratch, str(NUM_FEW)))["seconds"] for _ in range(turns)]
        metrics["start_seconds"] = plain_value(started, unit="s", note=f"{NUM_FEW:,} events")

        def rate(side: str, number: int) -> float:
            own = run(side, Path(scratch, str(number)))
            return float(own["rows"] / own["seconds"])

        for rival, sizes in compared.items():
            for number in sizes:
                sides = (partial(rate, rival, number), partial(rate, "ours", number))
                theirs, ours = in_turns(*sides, repeats=pairs)
                about = f"{number:,} events, against {'plain DuckDB SQL' if rival == 'duckdb' else 'pandas'}"
                name = f"rate_vs_{rival}" + (f"_{number}" if len(sizes) > 1 else "")
                metrics[name] = compare(theirs, ours, unit="samples/s", note=about)
    finish(options, metrics)


if __name__ == "__main__":
    main()
