"""Growth of every step: seconds and peak memory over samples and over rows of tables, and their slopes on log axes.

    python benchmarks/growth.py [--quick] [--json PATH|-] [--seed K] [--work FOLDER] [--only LOG]

Samples grow from 1 to 64 million with tables of 1 million rows together, then rows grow from 1 to 100 million with 4
million samples. The data is synthetic (Zipf 1.05): a user id, an item id, the last 8 items and three dense values, 16
samples per session; one half of the rows belongs to users, the other to items, 8 weights each. Every step is the
command that a user calls, in a process of its own: start-up counts, memory is that of its largest process.

A slope of 1 is linear. `slope` is fitted to all sizes, `last` is the one between the two largest, where start-up counts
least. Every step's result is kept in --work, so the same command resumes an interrupted benchmark. A new version of the
code needs a new folder.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Metric, Options, finish, plain_value, say, warn_if_busy

from recmill.artifacts import write_text_atomically
from recmill.data.sources.synthetic.config import History, IdList, SyntheticConfig, UserGroup

DIM, HISTORY, SAMPLES_PER_SESSION = 8, 8, 16
TOPOLOGY = "nodes: 2\nranks_per_node: 4\nintra_node_bytes_per_s: 10e9\ninter_node_bytes_per_s: 1.25e9\n"
SETTINGS = {  # one process and whole tables; a copy for checkpoints would depend on the memory that is free
    "batch_size": "4096",
    "checkpoint_async": "false",
    **dict.fromkeys(("trial", "tiers", "hot_batches", "sharing"), "false"),
}
# The output of each step, and the command that writes it.
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "generate": ("log", ()),
    "cluster": (
        "dataset",
        ("cluster", "log", "--layout=deduplicated", "--memory-limit=2GB", "--eval-fraction=0.1", "--out=dataset"),
    ),
    "profile": ("profile", ("profile", "dataset", "--out=profile")),
    "plan": (
        "plan",
        ("plan", "profile", "--topology=topology.yaml", "--memory-budget=2GiB", "--hot-budget=4MiB", "--out=plan"),
    ),
    "layout": ("hot", ("layout", "dataset", "--plan=plan", "--out=hot")),
    "train": ("run", ("train", "dataset", *(f"--set={name}={value}" for name, value in SETTINGS.items()), "--out=run")),
    "evaluate": ("", ("evaluate", "run/checkpoint", "dataset")),
}
FIGURES = ("seconds", "cpu_seconds", "peak_bytes")

# A child starts with the peak memory of the process that spawns it, so a small process stands between.
MEASURE = """
import json, os, sys, time
started = time.perf_counter()
_, status, used = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
seconds, cpu_seconds = time.perf_counter() - started, used.ru_utime + used.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": used.ru_maxrss * 1024}))
sys.exit(os.waitstatus_to_exitcode(status) and 1)
"""


@dataclass(frozen=True, kw_only=True)
class Log:
    """The size of one log; rows are those of all tables."""

    samples: int
    rows: int

    @property
    def name(self) -> str:
        return f"samples-{self.samples}-rows-{self.rows}"


@dataclass(frozen=True, kw_only=True)
class Sweeps:
    """Samples grow with the fewest rows, rows grow with `fixed_samples`."""

    samples: tuple[int, ...]
    rows: tuple[int, ...]
    fixed_samples: int

    def logs(self, axis: str) -> list[Log]:
        if axis == "samples":
            return [Log(samples=number, rows=self.rows[0]) for number in self.samples]
        return [Log(samples=self.fixed_samples, rows=number) for number in self.rows]


M = 10**6
SIZES = {
    "tiny": Sweeps(samples=(2_000, 4_000), rows=(1_000, 4_000), fixed_samples=4_000),
    "quick": Sweeps(samples=(M // 4, M), rows=(M, 4 * M), fixed_samples=M),
    "full": Sweeps(samples=(M, 4 * M, 16 * M, 64 * M), rows=(M, 10 * M, 100 * M), fixed_samples=4 * M),
}


def log_config(log: Log, seed: int) -> SyntheticConfig:
    rows = log.rows // 2
    users = UserGroup(
        name="user", lists=(IdList(name="user", num_rows=rows, dim=DIM),), dense=("activity",), stay_prob=1.0
    )
    return SyntheticConfig(
        name="growth",
        num_sessions=log.samples // SAMPLES_PER_SESSION,
        samples_per_session=SAMPLES_PER_SESSION,
        zipf=1.05,
        stay_prob=0.9,
        shift_prob=0.5,
        user_groups=(users,),
        histories=(History(name="history", item="item", length=HISTORY),),
        items=(IdList(name="item", num_rows=rows, dim=DIM),),
        item_dense=("price", "age"),
        seed=seed,
    )


def generate(samples: int, rows: int, seed: int) -> None:
    from recmill.data.sources.synthetic.generator import generate_log

    generate_log(log_config(Log(samples=samples, rows=rows), seed), out="log")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Runs the steps of every log; a step's figures are kept beside its output."""

    work: Path
    seed: int

    def cells(self, log: Log) -> dict[str, dict[str, float]]:
        """The figures of every step of one log; outputs are removed when the last step is measured."""
        folder = self.work / log.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "topology.yaml").write_text(TOPOLOGY, encoding="utf-8")
        found = {step: self._cell(folder, log, step) for step in STEPS}
        for output in filter(None, (output for output, _ in STEPS.values())):
            shutil.rmtree(folder / output, ignore_errors=True)
        return found

    def _cell(self, folder: Path, log: Log, step: str) -> dict[str, float]:
        kept = folder / f"{step}.json"
        if not kept.exists():
            output, arguments = STEPS[step]
            if output:
                shutil.rmtree(folder / output, ignore_errors=True)  # of an interrupted call
            own = [str(Path(__file__).resolve()), "--generate", *map(str, (log.samples, log.rows, self.seed))]
            found = measure([sys.executable, *(("-m", "recmill", *arguments) if arguments else own)], folder)
            say(f"{log.name} {step}: {found['seconds']:.1f} s, {found['peak_bytes'] / 1e9:.2f} GB")
            write_text_atomically(kept, json.dumps(found) + "\n")
        figures: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
        return figures


def measure(command: Sequence[str], folder: Path) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of a command and the processes that it starts."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def slopes(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """(slope of a line fitted to all sizes, slope between the two largest), both on log axes."""
    x, y = np.log(sizes), np.log(values)
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


def axis_metrics(axis: str, sizes: Sequence[int], cells: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Metric]]:
    """The slope of every figure of every step."""
    for step in STEPS:
        for figure in FIGURES:
            fitted, last = slopes(sizes, [found[step][figure] for found in cells])
            yield f"{axis}_{step}_{figure}", plain_value([fitted], unit="slope", note=f"last: {last:.2f}")


def cell_text(found: dict[str, float]) -> str:
    """Seconds, CPU seconds and memory."""
    return f"{found['seconds']:,.0f} s ({found['cpu_seconds']:,.1f} CPU), {found['peak_bytes'] / 1e9:.2f} GB"


def table(axis: str, sizes: Sequence[int], cells: Sequence[dict[str, Any]]) -> str:
    """The table of docs/scale.md."""
    lines = [f"| {axis} | {' | '.join(f'{size:,}' for size in sizes)} | slope (last) of seconds | of CPU | of memory |"]
    lines.append("|---" * (len(sizes) + 4) + "|")
    for step in STEPS:
        shown = [cell_text(found[step]) for found in cells]
        fits = [slopes(sizes, [found[step][figure] for found in cells]) for figure in FIGURES]
        shown += [f"{fitted:.2f} ({last:.2f})" for fitted, last in fits]
        lines.append(f"| {step} | {' | '.join(shown)} |")
    return "\n".join(lines)


def minutes_left(waiting: Sequence[Log], measured: dict[Log, dict[str, Any]]) -> float:
    """If seconds grow with samples, and a tenth as much with rows."""
    weights = {log: log.samples + log.rows / 10 for log in (*waiting, *measured)}
    spent = sum(found["seconds"] for cells in measured.values() for found in cells.values())
    done = math.fsum(weights[log] for log in measured)
    return spent / done * math.fsum(weights[log] for log in waiting) / 60


def main() -> None:
    if sys.argv[1:2] == ["--generate"]:
        generate(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to a million samples and 4 million rows")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", default="runs/growth", help="folder of the data and of finished steps")
    parser.add_argument(
        "--only", action="append", default=[], metavar="LOG", help="only this log, e.g. samples-4000000-rows-1000000"
    )
    given = parser.parse_args()
    quick = given.quick or given.tiny
    options = Options(benchmark="growth", quick=quick, tiny=given.tiny, json_path=given.json, seed=given.seed)
    warn_if_busy()
    run(options, SIZES[options.size], Path(given.work).resolve() / options.size, only=given.only)


def run(options: Options, sweeps: Sweeps, work: Path, *, only: Sequence[str]) -> None:
    growth = Growth(work=work / f"seed-{options.seed}", seed=options.seed)
    axes = {axis: sweeps.logs(axis) for axis in ("samples", "rows")}
    logs = [log for log in dict.fromkeys([*axes["samples"], *axes["rows"]]) if not only or log.name in only]
    measured: dict[Log, dict[str, Any]] = {}
    for number, log in enumerate(logs, 1):
        measured[log] = growth.cells(log)
        left = minutes_left(logs[number:], measured)
        say(f"{number} of {len(logs)} logs, about {left:.0f} minutes left")
    metrics: dict[str, Metric] = {}
    for axis, wanted in axes.items():
        own = [log for log in wanted if log in measured]
        if len(own) > 1:
            sizes, cells = [getattr(log, axis) for log in own], [measured[log] for log in own]
            metrics |= dict(axis_metrics(axis, sizes, cells))
            print(table(axis, sizes, cells), end="\n\n", file=sys.stderr if options.json_path == "-" else sys.stdout)
    rows = [{**vars(log), "steps": cells} for log, cells in measured.items()]
    finish(options, metrics, extra={"cells": rows, "sweeps": {axis: [vars(x) for x in axes[axis]] for axis in axes}})


if __name__ == "__main__":
    main()
