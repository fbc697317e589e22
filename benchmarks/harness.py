"""Shared by all benchmarks: arguments, measuring in turns, the printed table and the JSON.

A result is one object with benchmark, size, quick, commit, code, date, machine, metrics and skipped. `code` has a hash
of each part of the code that the benchmark measures (measured_code.py): results.py marks rows as stale by it. Each
metric has `baseline`, `ours`, `ratio` (above 1 means better), `pairs` (how many pairs of neighbouring turns, or runs
of a value without a baseline), `is_exact`, `spread`, `unit` and `note`; a plain value is stored in `ours` and has no
ratio. `spread` has the lowest and highest of each side and of the pairs' ratios, and the 95% bootstrap `interval` of
the mean over pairs, None for fewer than two. A count that every run repeats (bytes stored or sent) is exact.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from measured_code import hash_code

from recmill.artifacts import write_text_atomically
from recmill.report.ablation import bootstrap_interval
from recmill.training.processes import frozen_objects

Metric = dict[str, Any]
MIN_PAIRS = 9  # of a full form: with fewer, no row is met
STARTED = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parsed command line."""

    benchmark: str
    quick: bool
    tiny: bool
    json_path: str | None
    seed: int
    only: tuple[str, ...] = ()  # names of the parts to measure; empty: all

    @property
    def size(self) -> str:
        return "tiny" if self.tiny else "quick" if self.quick else "full"


def parse_options(description: str, *, quick: str) -> Options:
    """Parse the arguments of a benchmark; `quick` is the help text of --quick: what it makes smaller."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        metavar="PART",
        action="append",
        default=[],
        help="measure this part alone and keep it for a later call, with --json PATH; may be given several times",
    )
    given = parser.parse_args()
    name = Path(sys.argv[0]).stem
    return Options(
        benchmark=name,
        quick=given.quick or given.tiny,
        tiny=given.tiny,
        json_path=given.json,
        seed=given.seed,
        only=tuple(given.only),
    )


def timed(run: Callable[[], object], *, warm_ups: int = 1) -> Callable[[], float]:
    """A function that returns the seconds of one call, after calls that do not count."""

    def seconds() -> float:
        for _ in range(warm_ups):
            run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def in_turns(*sides: Callable[[], float], repeats: int, warm_ups: int = 0) -> list[list[float]]:
    """Measurements of each side, taken in turns and in both orders so that a busy machine slows all sides alike."""
    measured: list[list[float]] = [[] for _ in sides]
    for turn in range(warm_ups + repeats):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            value = sides[side]()
            if turn >= warm_ups:
                measured[side].append(value)
    return measured


@contextmanager
def fresh_processes(*sizes: int) -> Iterator[Iterator[ProcessPoolExecutor]]:
    """Pools of processes that have imported what this one has and done nothing yet, like a rank before training.

    Earlier measurements in the same process distort later ones: with their memory and objects around, deduplicated
    training measured a tenth slower than alone, plain training did not. Call it before anything starts threads.
    """
    with frozen_objects(), ExitStack() as stack:  # as in ranks; garbage collections would copy shared pages
        fork = get_context("fork")
        pools = [stack.enter_context(ProcessPoolExecutor(size, mp_context=fork)) for size in sizes]
        for started in [pool.submit(os.getpid) for pool in pools]:
            started.result()
        yield iter(pools)


def compare(
    baseline: Sequence[float], ours: Sequence[float], *, unit: str, note: str = "", less_is_better: bool = False
) -> Metric:
    """The metric of two sides that were measured in pairs: the geometric mean of the pairs' ratios and its interval.

    A pair shares the slowness of the machine at that time, so ratios of pairs vary less than speeds.
    """
    logs = [math.log(b / o if less_is_better else o / b) for b, o in zip(baseline, ours, strict=True)]
    sides = [math.exp(statistics.fmean(map(math.log, side))) for side in (baseline, ours)]
    spread = {"baseline": _range(baseline), "ours": _range(ours), "ratio": _range([math.exp(log) for log in logs])}
    interval = _interval(logs)
    return {
        "baseline": sides[0],
        "ours": sides[1],
        "ratio": math.exp(statistics.fmean(logs)),
        "pairs": len(logs),
        "is_exact": False,
        "spread": {**spread, "interval": [math.exp(end) for end in interval] if interval else None},
        "unit": unit,
        "note": note,
    }


def compare_counts(baseline: float, ours: float, *, unit: str, note: str = "") -> Metric:
    """The metric of two counts that every run repeats, such as bytes on disk: fewer is better, nothing is random."""
    metric = compare([baseline], [ours], unit=unit, note=note, less_is_better=True)
    return {**metric, "is_exact": True, "spread": {**metric["spread"], "interval": [metric["ratio"]] * 2}}


def plain_value(values: Sequence[float], *, unit: str, note: str = "") -> Metric:
    """A metric without a baseline, or a difference over pairs: the mean over runs and its interval."""
    spread = {"ours": _range(values), "interval": _interval(values)}
    shared: Metric = {"baseline": None, "ratio": None, "pairs": len(values), "is_exact": False}
    return {**shared, "ours": statistics.fmean(values), "spread": spread, "unit": unit, "note": note}


def plain_count(value: float, *, unit: str, note: str = "") -> Metric:
    """A value that every run repeats."""
    metric = plain_value([value], unit=unit, note=note)
    return {**metric, "is_exact": True, "spread": {**metric["spread"], "interval": [value, value]}}


def _interval(values: Sequence[float]) -> list[float] | None:
    return list(bootstrap_interval(values)) if len(values) > 1 else None


def without_network(
    metrics: Mapping[str, Metric], names: Iterable[str], *, kind: str, note: str
) -> tuple[dict[str, Metric], dict[str, str]]:
    """(metrics, skipped): over loopback the named metrics say nothing about a network and are skipped."""
    left_out = set() if kind == "namespaces" else set(names) & set(metrics)
    kept = {name: metric for name, metric in metrics.items() if name not in left_out}
    return kept, dict.fromkeys(sorted(left_out), f"no network namespaces: {note}")


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def say(text: str) -> None:
    """Print a progress line with the seconds since the start to standard error."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def finish(
    options: Options,
    metrics: Mapping[str, Metric],
    *,
    skipped: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print the table and write the JSON if --json was given. `extra` adds keys to the object."""
    print_table(metrics, skipped or {}, file=sys.stderr if options.json_path == "-" else sys.stdout)
    text = write_result(options, metrics, skipped=skipped, extra=extra)
    if options.json_path == "-":
        print(text)


def write_result(
    options: Options,
    metrics: Mapping[str, Metric],
    *,
    skipped: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The JSON, also written to the file of --json."""
    result = {
        "benchmark": options.benchmark,
        "size": options.size,
        "quick": options.quick,
        "commit": describe_commit(),
        "code": hash_code(options.benchmark),
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "metrics": dict(metrics),
        "skipped": dict(skipped or {}),
        **(extra or {}),
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    if options.json_path and options.json_path != "-":
        write_text_atomically(Path(options.json_path), text + "\n")
    return text


def print_table(metrics: Mapping[str, Metric], skipped: Mapping[str, str], *, file: Any) -> None:
    width = max((len(name) for name in (*metrics, *skipped)), default=0)
    print(
        f"{'':{width}}{'baseline':>14}{'ours':>14}  {'unit':14}{'ratio':>8}  {'95% interval':18}{'pairs':>6}", file=file
    )
    for name, metric in metrics.items():
        baseline = "" if metric["baseline"] is None else _number(metric["baseline"])
        line = f"{name:{width}}{baseline:>14}{_number(metric['ours']):>14}  {metric['unit']:14}"
        if metric["ratio"] is not None:
            ends = metric["spread"]["interval"]
            interval = "exact" if metric["is_exact"] else f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "one run"
            line += f"{metric['ratio']:7.2f}x  {interval:18}{metric['pairs']:6}"
        print(line.rstrip(), file=file)
    for name, metric in metrics.items():
        if metric["note"]:
            print(f"  {name}: {metric['note']}", file=file)
    for name, reason in skipped.items():
        print(f"{name:{width}}  skipped: {reason}", file=file)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def describe_commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip()


def describe_machine() -> str:
    memory_gb = psutil.virtual_memory().total / 2**30
    system = f"{platform.machine()}, {_cpu_model()}, {os.cpu_count()} cores, {memory_gb:.0f} GiB, {platform.system()}"
    return f"{system}, Python {platform.python_version()}, torch {version('torch')}, pyarrow {version('pyarrow')}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown CPU"


def warn_if_busy() -> None:
    """Warn if other work runs on this machine, which makes the numbers unreliable."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        say(f"warning: the load of this machine is {load:.1f} on {cores} cores; run again when it is quiet")
