"""How fast `recmill prepare` makes samples, against the same work in plain DuckDB SQL and in pandas.

    python benchmarks/prepare.py [--quick] [--json PATH|-] [--seed K]

Events with text ids, two side tables, sessions, histories of the last 50 products and one negative each; every side
runs in a process of its own, and loading its libraries counts. SQL and pandas may use all memory; recmill keeps its
limit. The rivals do less: they drop a negative that hits a positive, look no further back than rows with equal times in
any order, and check neither the data nor the samples. Pairs alternate; a ratio is the mean over pairs with its 95%
interval. `start_seconds` is a log of 1,000 events: what a run costs before events count.

With --json PATH every single run is kept in PATH.parts, and the logs in PATH.logs, until all are done: a call that was
stopped resumes after its last run, so that the full form (about 25 minutes) can be measured in pieces, also by name
(--only rate_vs_duckdb_300000).
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from harness import compare, parse_options, plain_value, say, warn_if_busy
from parts import Found, Parts
from prepare_rivals import measure, write_shop

# Events of our rate, turns of it (or those of a comparison of that size), events of the comparisons, pairs of these.
SIZES: dict[str, tuple[int, int, dict[str, tuple[int, ...]], int]] = {
    "tiny": (3_000, 1, {"duckdb": (2_000,), "pandas": (2_000,)}, 2),
    "quick": (1_000_000, 3, {"duckdb": (300_000,), "pandas": (300_000,)}, 3),
    "full": (10_000_000, 5, {"pandas": (1_000_000,), "duckdb": (300_000, 1_000_000, 10_000_000)}, 9),
}
NUM_FEW = 1_000
MEMORY_LIMIT_BYTES = 2 * 10**9
TARGET = "at least 300,000"


class Runs:
    """Single runs, each made once and kept."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.parts, self.folder = parts, folder

    def run(self, side: str, number: int, turn: int, *, beside: str = "") -> dict[str, Any]:
        """One side in a fresh process on a log of `number` events, in turns with `beside`."""
        name = f"{side} beside {beside or 'nothing'}, {number:,} events, turn {turn}"
        if name not in self.parts:
            found = self._measure(side, number)
            say(f"{name}: {found['rows']:,} rows in {found['seconds']:.1f} s, {found['peak_bytes'] / 1e6:,.0f} MB")
            self.parts.keep(name, found)
        kept: dict[str, Any] = self.parts[name]
        return kept

    def _measure(self, side: str, number: int) -> dict[str, Any]:
        log, out = self.folder / str(number), self.folder / f"out-{side}"
        if not (log / "log.yaml").exists():  # written last
            log.mkdir(parents=True, exist_ok=True)
            write_shop(log, number, seed=self.parts.options.seed)
        shutil.rmtree(out, ignore_errors=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found: dict[str, Any] = pool.submit(measure, side, str(log), str(out), MEMORY_LIMIT_BYTES).result()
        shutil.rmtree(out, ignore_errors=True)
        return found


def compared_with(runs: Runs, rival: str, number: int, pairs: int, name: str) -> Found:
    theirs, ours = [], []
    for turn in range(pairs):
        order = (rival, "ours") if turn % 2 == 0 else ("ours", rival)
        found = {side: runs.run(side, number, turn, beside=rival) for side in order}
        theirs.append(found[rival]["rows"] / found[rival]["seconds"])
        ours.append(found["ours"]["rows"] / found["ours"]["seconds"])
    about = f"{number:,} events, against {'plain DuckDB SQL' if rival == 'duckdb' else 'pandas'}"
    return Found(metrics={name: compare(theirs, ours, unit="samples/s", note=about)})


def our_rate(runs: Runs, num_events: int, turns: int, *, beside: str) -> Found:
    found = [runs.run("ours", num_events, turn, beside=beside) for turn in range(turns)]
    note = f"{num_events:,} events, two side tables, histories of 50, one negative each; {TARGET}"
    rates = [own["rows"] / own["seconds"] for own in found]
    cpu = [own["rows"] / own["cpu_seconds"] for own in found]
    peaks = [own["peak_bytes"] for own in found]
    limit = f"limit {MEMORY_LIMIT_BYTES:,} bytes"
    return Found(
        metrics={
            "samples_per_s": plain_value(rates, unit="samples/s", note=note),
            "samples_per_cpu_s": plain_value(cpu, unit="samples/CPU s", note="all threads together"),
            "peak_memory": plain_value(peaks, unit="bytes", note=limit),
        }
    )


def start(runs: Runs, turns: int) -> Found:
    seconds = [runs.run("ours", NUM_FEW, turn)["seconds"] for turn in range(turns)]
    return Found(metrics={"start_seconds": plain_value(seconds, unit="s", note=f"{NUM_FEW:,} events")})


@contextmanager
def logs_of(parts: Parts) -> Iterator[Path]:
    """A folder for the logs: beside the kept runs, or a temporary one."""
    if parts.path is None:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    folder = parts.path.with_suffix(".logs")
    yield folder
    if not parts.left_out and not parts.failed:  # else the next call needs them
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    options = parse_options(__doc__, quick="a tenth of the events, 3 pairs instead of 9")
    warn_if_busy()
    num_events, turns, compared, pairs = SIZES[options.size]
    parts = Parts(options)
    with logs_of(parts) as folder:
        runs = Runs(parts, folder)
        parts.measure("start", lambda: start(runs, turns))
        for rival, sizes in compared.items():
            for number in sizes:
                name = f"rate_vs_{rival}" + (f"_{number}" if len(sizes) > 1 else "")
                parts.measure(name, partial(compared_with, runs, rival, number, pairs, name))
        beside = "duckdb" if num_events in compared["duckdb"] else ""  # then these runs count
        parts.measure("rate", lambda: our_rate(runs, num_events, pairs if beside else turns, beside=beside))
    parts.finish()


if __name__ == "__main__":
    main()
