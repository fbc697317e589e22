"""Does the default run ever lose? Default switches against none, over data sets, models and batch sizes.

rate_DATA_MODEL_BATCH   samples/s of the default run over its baseline's (time-ordered data, all switches off,
                        TorchRec's planner), two processes on this machine; the trial is not part of it
auc_DATA_MODEL_BATCH    AUC of the default run less the baseline's, mean over pairs; the note has its standard error
time_DATA_MODEL_BATCH   training seconds to the AUC of the pair's baseline less 0.002, baseline over ours, where both
                        sides reach it
lowest_rate             the lowest ratio of all cells
lost_cells              cells whose whole interval of the rate is below 0.97, or whose AUC is below the baseline's by
                        more than two standard errors and more than 0.0005: sums in another order differ by 1e-6
doubtful_cells          other cells whose rate is below 0.97: the interval says that this may be noise

A cell trains both sides in turns (A B B A) in one process group, every pair with its own seed, as many pairs as
--seconds-per-cell allows: at least 4 (--min-pairs), at most 24. A training is a whole run of at least 30 steps: each
batch size has a sample of the log's sessions of its own, so that 256 samples per step do not take minutes. Data, plans
and finished cells are kept in --work: an interrupted grid continues, and a plan is made once for both models.

    python benchmarks/auto_grid.py [--quick] [--json PATH|-] [--work FOLDER] [--cell tiny-dlrm-256 ...]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto_data import cut_log, make_log, names
from harness import Metric, Options, compare, finish, plain_value, say, warn_if_busy

from recmill.artifacts import AccessProfile, Dataset, InputError, ShardPlan
from recmill.data.cluster import cluster_sessions
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.progress import no_progress
from recmill.report.ablation import TOLERANCE, time_to_auc
from recmill.training.config import TrainConfig
from recmill.training.processes import rank_environment
from recmill.training.switches import Switch
from recmill.training.trainer import lay_out_hot, make_job
from recmill.training.verdicts import CACHE_SUFFIX

NUM_RANKS = 2
MODELS, BATCHES = ("dlrm", "dcn"), (256, 2048, 8192)
QUICK_BATCHES = (2048,)
SECONDS = {"tiny": 0.0, "quick": 20.0, "full": 60.0}  # of the pairs of a cell: training, evaluation, building models
MIN_PAIRS, MAX_PAIRS = {"tiny": 2, "quick": 4, "full": 4}, 24
MIN_STEPS = {"tiny": 20, "quick": 30, "full": 30}  # of a training, so that its trial runs
MIN_ROWS = 60_000  # of a log: with 256 samples per step, 210 steps
EVALUATIONS = 8  # of a training, for the time to an AUC
HELD_OUT = 0.1
MIN_RATE = 0.97
MIN_AUC_LOSS = 0.0005
RANK_SCRIPT = Path(__file__).with_name("auto_rank.py")
MEMORY_BUDGET_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Cell:
    data: str
    model: str
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}-{self.batch_size}"

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells to measure, and the folder that holds their data and results."""

    options: Options
    work: Path
    seconds: float
    min_pairs: int
    chosen: tuple[str, ...] = ()

    def cells(self) -> list[Cell]:
        batches = BATCHES if self.options.size == "full" else QUICK_BATCHES
        data = ("tiny", "single") if self.options.size == "tiny" else names()
        models = MODELS[:1] if self.options.size == "tiny" else MODELS
        every = [Cell(data=d, model=m, batch_size=b) for d in data for b in batches for m in models]
        if not self.chosen:
            return every
        parts = [name.rsplit("-", 2) for name in self.chosen]
        return [Cell(data=d, model=m, batch_size=int(b)) for d, m, b in parts]

    def _log(self, cell: Cell) -> Path:
        """The raw log of a cell: of the data set's sessions, as many as make MIN_STEPS steps."""
        whole = self.work / "data" / cell.data / "raw"
        if not (whole / "schema.json").exists():
            make_log(cell.data, out=whole, quick=self.options.quick, seed=self.options.seed)
        wanted = math.ceil(max(MIN_ROWS, 1.1 * MIN_STEPS[self.options.size] * cell.batch_size / (1 - HELD_OUT)))
        cut = self.work / "data" / cell.data / f"rows-{wanted}" / "raw"
        if not (cut / "schema.json").exists():
            cut_log(whole, out=cut, num_rows=wanted)
        return cut

    def _dataset(self, cell: Cell, layout: str) -> Dataset:
        raw = self._log(cell)
        target = raw.with_name(layout)
        if (target / Dataset.manifest_name).exists():
            return Dataset.load(target)
        # Random sessions: what a shop or a news page shows last is new to every model (docs/log.md).
        return cluster_sessions(raw, out=target, layout=layout, eval_fraction=HELD_OUT, eval_sessions="random")

    def _plan(self, cell: Cell, dataset: Dataset, *, is_default: bool) -> ShardPlan:
        folder = Path(dataset.path)
        target = folder.with_name(f"{folder.name}-plan-{cell.batch_size}")
        if (target / ShardPlan.manifest_name).exists():
            return ShardPlan.load(target)
        profile = folder.with_name(f"{folder.name}-profile")
        if not (profile / AccessProfile.manifest_name).exists():
            profile_access(dataset, out=profile)
        return plan_shards(
            profile,
            out=target,
            topology=Topology.local(NUM_RANKS),
            memory_budget_bytes=MEMORY_BUDGET_BYTES,
            hot_budget_bytes="auto" if is_default else None,
            strategy="tiers" if is_default else "torchrec",
            batch_size=cell.batch_size,
        )

    def jobs(self, cell: Cell, out: Path) -> list[dict[str, Any]]:
        """The baseline and the default run of a cell."""
        found = []
        for name, layout in (("baseline", "time"), ("default", "auto")):
            dataset = self._dataset(cell, layout)
            plan = self._plan(cell, dataset, is_default=name == "default")
            shutil.rmtree(plan.path + CACHE_SUFFIX, ignore_errors=True)  # a cell that is measured again tries again
            per_epoch = math.ceil(sum(part.num_rows for part in dataset.split_parts("train")) / cell.batch_size)
            epochs = math.ceil(MIN_STEPS[self.options.size] / per_epoch)
            config = TrainConfig(
                model=cell.model,
                batch_size=cell.batch_size,
                epochs=epochs,
                seed=self.options.seed,
                threads=1,
                eval_every=math.ceil(epochs * per_epoch / EVALUATIONS),
            )
            if name == "baseline":
                config = TrainConfig.from_overrides({**dict.fromkeys(Switch, "false"), "trial": "false"}, base=config)
            run = out / name
            run.mkdir(parents=True)
            job = make_job(dataset.path, out=run, plan=plan.path, allocation=None, nproc=NUM_RANKS, config=config)
            hot = Path(f"{plan.path}-hot")
            hot.mkdir(exist_ok=True)
            found.append({**lay_out_hot(job, hot, config, no_progress), "name": name})
        return found

    def is_measured(self, cell: Cell) -> bool:
        return self._kept(cell).exists()

    def _kept(self, cell: Cell) -> Path:
        return self.work / "cells" / f"{cell.name}.json"

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Both sides of a cell in all pairs; kept, so that it is measured once."""
        kept = self._kept(cell)
        if kept.exists():
            return dict(json.loads(kept.read_text(encoding="utf-8")))
        with tempfile.TemporaryDirectory(prefix="recmill-cell-") as scratch:
            jobs, result = Path(scratch) / "jobs.json", Path(scratch) / "result.json"
            limits = {"seconds": self.seconds, "min_pairs": self.min_pairs, "max_pairs": MAX_PAIRS}
            wanted = {**limits, "jobs": self.jobs(cell, Path(scratch) / "runs")}
            jobs.write_text(json.dumps(wanted), encoding="utf-8")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
            done = subprocess.run(
                [sys.executable, *launcher, str(RANK_SCRIPT), str(jobs), str(result)],
                capture_output=True,
                text=True,
                env=rank_environment(1),
            )
            if done.returncode:
                raise SystemExit(f"cell {cell.name} failed:\n{done.stderr[-4000:]}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(result.read_text(encoding="utf-8"), encoding="utf-8")
        return dict(json.loads(kept.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What the pairs of a cell gave."""

    cell: Cell
    baseline: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    trial_s: float

    @property
    def rate(self) -> Metric:
        rates = [[run["samples_per_s"] for run in side] for side in (self.baseline, self.ours)]
        note = f"on: {self.on}; {len(self.ours)} pairs of {self.ours[0]['num_steps']} steps"
        return compare(*rates, unit="samples/s", note=f"{note}; trial {self.trial_s:.1f} s")

    @property
    def on(self) -> str:
        """The switches that the trial turned on."""
        return ", ".join(entry["switch"] for entry in self.ours[-1]["decisions"] if entry["is_on"]) or "nothing"

    @property
    def auc(self) -> tuple[float, float]:
        """The mean difference over pairs, and its standard error."""
        differences = [own["auc"] - other["auc"] for own, other in zip(self.ours, self.baseline, strict=True)]
        return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))

    @property
    def time_to_auc(self) -> Metric | None:
        """Seconds to the AUC of the pair's baseline; None where no pair reached it on both sides."""
        reached = []
        for own, other in zip(self.ours, self.baseline, strict=True):
            if seconds := times_to_auc(other, own, other["auc"]):
                reached.append(seconds)
        if not reached:
            return None
        note = f"reached in {len(reached)} of {len(self.ours)} pairs"
        theirs, ours = zip(*reached, strict=True)
        return compare(theirs, ours, unit="s", note=note, less_is_better=True)

    @property
    def is_lost(self) -> bool:
        """Whether the default run is slower than its baseline, or less accurate, beyond noise."""
        difference, error = self.auc
        return self.rate["spread"]["interval"][1] < MIN_RATE or difference < -max(2 * error, MIN_AUC_LOSS)

    @property
    def is_doubtful(self) -> bool:
        return not self.is_lost and self.rate["ratio"] < MIN_RATE

    def metrics(self) -> dict[str, Metric]:
        difference, error = self.auc
        found = {"rate": self.rate, "time": self.time_to_auc}
        found["auc"] = plain_value([difference], unit="AUC", note=f"standard error {error:.4f}")
        return {f"{name}_{self.cell.key}": metric for name, metric in found.items() if metric is not None}

    def line(self) -> str:
        """A row of the table of docs/auto.md."""
        rate, (difference, error), reached = self.rate, self.auc, self.time_to_auc
        low, high = rate["spread"]["interval"]
        shown = f"{reached['ratio']:.2f}x" if reached else "not reached"
        verdict = "lost" if self.is_lost else "doubtful" if self.is_doubtful else ""
        columns = (
            *(self.cell.data, self.cell.model, f"{self.cell.batch_size:,}", len(self.ours)),
            *(f"{rate['ratio']:.2f}x ({low:.2f} to {high:.2f})", shown, f"{difference:+.4f} ± {error:.4f}"),
            *(self.on, verdict),
        )
        return f"| {' | '.join(map(str, columns))} |"


def times_to_auc(baseline: dict[str, Any], ours: dict[str, Any], auc: float) -> tuple[float, float] | None:
    """Seconds of both trainings to an AUC less the tolerance; None where one does not reach it."""
    curves = [[(entry["seconds"], entry["auc"]) for entry in run["evaluations"]] for run in (baseline, ours)]
    first, second = (time_to_auc({"evaluations": curve}, auc - TOLERANCE) for curve in curves)
    return None if first is None or second is None else (first, second)


HEADER = """| data | model | batch | pairs | samples/s | time to AUC | AUC difference | on | |
|---|---|---|---|---|---|---|---|---|"""


def measure_all(grid: Grid) -> tuple[list[CellResult], dict[str, str]]:
    """The results of all cells, and why some were skipped. Prints a line per cell with the time left."""
    results, skipped, cells = [], dict[str, str](), grid.cells()
    spent = list[float]()  # seconds of the cells that were measured now
    for number, cell in enumerate(cells, 1):
        began, is_new = time.perf_counter(), not grid.is_measured(cell)
        try:
            found = grid.measure(cell)
        except InputError as error:
            skipped[f"rate_{cell.key}"] = str(error)
            say(f"{number} of {len(cells)}  {cell.name}: skipped, {error}")
            continue
        spent += [time.perf_counter() - began] if is_new else []
        sides = {"baseline": found["baseline"], "ours": found["default"]}
        results.append(CellResult(cell=cell, **sides, trial_s=found["trial_seconds"]))
        waiting = sum(not grid.is_measured(later) for later in cells[number:])
        left = f"{waiting * statistics.fmean(spent) / 60:.0f} minutes left" if spent else "kept"
        say(f"{number} of {len(cells)}, {left}  {results[-1].line()}")
    return results, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch size, 20 s per cell, less data")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", default="runs/auto-grid", help="folder of the data and of finished cells")
    parser.add_argument("--cell", action="append", default=[], metavar="DATA-MODEL-BATCH", help="only this cell")
    parser.add_argument(
        "--seconds-per-cell", type=float, metavar="S", help="of both sides' trainings; 60, with --quick 20"
    )
    parser.add_argument("--min-pairs", type=int, metavar="N", help="of a cell, however long they take; 4")
    given = parser.parse_args()
    options = Options(
        benchmark="auto_grid",
        quick=given.quick or given.tiny,
        tiny=given.tiny,
        json_path=given.json,
        seed=given.seed,
    )
    warn_if_busy()
    seconds = SECONDS[options.size] if given.seconds_per_cell is None else given.seconds_per_cell
    grid = Grid(
        options=options,
        work=Path(given.work) / options.size,
        seconds=seconds,
        min_pairs=given.min_pairs or MIN_PAIRS[options.size],
        chosen=tuple(given.cell),
    )
    results, skipped = measure_all(grid)
    metrics: dict[str, Metric] = {}
    for result in results:
        metrics |= result.metrics()
    if results:
        lowest = min(result.rate["ratio"] for result in results)
        metrics["lowest_rate"] = plain_value([lowest], unit="x", note="target: at least 0.97")
        for name, count in (
            ("lost_cells", sum(result.is_lost for result in results)),
            ("doubtful_cells", sum(result.is_doubtful for result in results)),
        ):
            metrics[name] = plain_value([float(count)], unit="cells", note=f"of {len(results)}; target: 0")
        print(HEADER, *(result.line() for result in results), sep="\n")
    finish(options, metrics, skipped=skipped)


if __name__ == "__main__":
    main()
