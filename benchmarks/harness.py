"""What every benchmark shares: its arguments, measuring in turns, the table and the JSON.

A result is one object: benchmark, quick, commit, machine, metrics, skipped. Each metric has `baseline`, `ours`, `ratio`
(above 1 means better), `spread` (lowest and highest of each side, and of the ratio of neighbouring turns), `unit` and
`note`; a plain value stands in `ours` and has no ratio.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from recmill.training.processes import frozen_objects

Metric = dict[str, Any]
STARTED = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asked for."""

    benchmark: str
    quick: bool
    tiny: bool
    json_path: str | None
    seed: int

    @property
    def size(self) -> str:
        return "tiny" if self.tiny else "quick" if self.quick else "full"


def parse_options(description: str, *, quick: str) -> Options:
    """The arguments of a benchmark; `quick` says what --quick makes smaller."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--tiny", action="store_true", help="show that it runs: sizes too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    name = Path(sys.argv[0]).stem
    return Options(
        benchmark=name, quick=given.quick or given.tiny, tiny=given.tiny, json_path=given.json, seed=given.seed
    )


def timed(run: Callable[[], object], *, warm_ups: int = 1) -> Callable[[], float]:
    """A function that gives the seconds of one call, after calls that do not count."""

    def seconds() -> float:
        for _ in range(warm_ups):
            run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def in_turns(*sides: Callable[[], float], repeats: int, warm_ups: int = 0) -> list[list[float]]:
    """What each side measures, time after time: in turns, so that a busy machine slows all, and in both orders."""
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
    """Pools of so many processes that imported what this one has and did nothing yet, as a rank when training begins.

    What was measured before in the same process is in the way: with its memory and objects around, training with
    distinct rows came out a tenth slower than alone, plain training did not. Call it before anything starts threads.
    """
    with frozen_objects(), ExitStack() as stack:  # as ranks do; collections would copy pages that processes share
        fork = get_context("fork")
        pools = [stack.enter_context(ProcessPoolExecutor(size, mp_context=fork)) for size in sizes]
        for started in [pool.submit(os.getpid) for pool in pools]:
            started.result()
        yield iter(pools)


def compare(
    baseline: Sequence[float], ours: Sequence[float], *, unit: str, note: str = "", less_is_better: bool = False
) -> Metric:
    """The metric of two sides that were measured in turns.

    The ratio is the median of those of neighbouring turns. The machine is slower in some turns than in others, and what
    both sides of a pair have in common says nothing of either: `baseline` and `ours` are what the median pair gives at
    the median speed, so that their ratio is that one. The spreads are of what was measured.
    """
    ratios = [b / o if less_is_better else o / b for b, o in zip(baseline, ours, strict=True)]
    ratio = statistics.median(ratios)
    speed = statistics.median(math.sqrt(b * o) for b, o in zip(baseline, ours, strict=True))
    sides = speed / math.sqrt(ratio), speed * math.sqrt(ratio)
    return {
        "baseline": sides[1] if less_is_better else sides[0],
        "ours": sides[0] if less_is_better else sides[1],
        "ratio": ratio,
        "spread": {"baseline": _range(baseline), "ours": _range(ours), "ratio": _range(ratios)},
        "unit": unit,
        "note": note,
    }


def plain_value(values: Sequence[float], *, unit: str, note: str = "") -> Metric:
    """A metric that has no baseline: the median and the spread."""
    shared: Metric = {"baseline": None, "ratio": None, "unit": unit, "note": note}
    return {**shared, "ours": statistics.median(values), "spread": {"ours": _range(values)}}


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def say(text: str) -> None:
    """A line for who waits, with the seconds since the start; the result is printed at the end."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def finish(
    options: Options,
    metrics: Mapping[str, Metric],
    *,
    skipped: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print the table and write the JSON where it was asked for. `extra` adds keys to the object."""
    print_table(metrics, skipped or {}, file=sys.stderr if options.json_path == "-" else sys.stdout)
    if not options.json_path:
        return
    result = {
        "benchmark": options.benchmark,
        "quick": options.quick,
        "commit": describe_commit(),
        "machine": describe_machine(),
        "metrics": dict(metrics),
        "skipped": dict(skipped or {}),
        **(extra or {}),
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    if options.json_path == "-":
        print(text)
    else:
        Path(options.json_path).write_text(text + "\n", encoding="utf-8")


def print_table(metrics: Mapping[str, Metric], skipped: Mapping[str, str], *, file: Any) -> None:
    width = max(len(name) for name in (*metrics, *skipped))
    print(f"{'':{width}}{'baseline':>14}{'ours':>14}  {'unit':14}{'ratio':>8}  {'lowest to highest':18}", file=file)
    for name, metric in metrics.items():
        baseline = "" if metric["baseline"] is None else _number(metric["baseline"])
        line = f"{name:{width}}{baseline:>14}{_number(metric['ours']):>14}  {metric['unit']:14}"
        if metric["ratio"] is not None:
            lowest, highest = metric["spread"]["ratio"]
            line += f"{metric['ratio']:7.2f}x  {f'{lowest:.2f} to {highest:.2f}':18}"
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
    """Say so if other work runs here: its numbers are worth little."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        say(f"warning: the load of this machine is {load:.1f} on {cores} cores; run again when it is quiet")
