"""Does the default run ever lose? Default switches against none, over data sets, models and batch sizes.

rate_DATA_MODEL_BATCH   samples/s of the default run over its baseline's (time-ordered data, all switches off,
                        TorchRec's planner), two processes on this machine; the trial is not part of it
auc_DATA_MODEL_BATCH    AUC of the default run less the baseline's; the note has the standard error over seeds
time_DATA_MODEL_BATCH   training seconds to the baseline's lowest final AUC less 0.002, baseline over ours
lowest_rate             the lowest ratio of all cells
lost_cells              cells whose rate is below 0.97 or whose AUC is below the baseline's by more than two standard
                        errors

A cell trains both sides in turns in one process group. Finished cells are kept in --work, so that an interrupted grid
continues; docs/auto.md shows the table of all cells.

    python benchmarks/auto_grid.py [--quick] [--json PATH|-] [--work FOLDER] [--cell tiny-dlrm-256 ...]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto_data import make_log, names
from harness import Metric, Options, compare, finish, plain_value, say, warn_if_busy

from recmill.artifacts import Dataset, InputError
from recmill.data.cluster import cluster_sessions
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.progress import no_progress
from recmill.report.ablation import TOLERANCE, time_to_auc
from recmill.training.config import TrainConfig
from recmill.training.processes import rank_environment
from recmill.training.switches import Switch
from recmill.training.trainer import lay_out_hot, make_job

NUM_RANKS = 2
MODELS, BATCHES = ("dlrm", "dcn"), (256, 2048, 8192)
QUICK_BATCHES = (2048,)
REPEATS = {"tiny": 2, "quick": 3, "full": 8}
MAX_STEPS = {"tiny": 22, "quick": 300, "full": 1000}  # of a training: 256 samples per step take long otherwise
MIN_RATE = 0.97
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


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells to measure, and the folder that holds their data and results."""

    options: Options
    work: Path
    chosen: tuple[str, ...] = ()

    def cells(self) -> list[Cell]:
        batches = BATCHES if self.options.size == "full" else QUICK_BATCHES
        data = ("tiny", "single") if self.options.size == "tiny" else names()
        models = MODELS[:1] if self.options.size == "tiny" else MODELS
        every = [Cell(data=d, model=m, batch_size=b) for d in data for m in models for b in batches]
        if not self.chosen:
            return every
        parts = [name.rsplit("-", 2) for name in self.chosen]
        return [Cell(data=d, model=m, batch_size=int(b)) for d, m, b in parts]

    def dataset(self, name: str, layout: str) -> Dataset:
        folder = self.work / "data" / name
        if not (folder / "raw" / "schema.json").exists():
            make_log(name, out=folder / "raw", quick=self.options.quick, seed=self.options.seed)
        target = folder / layout
        if (target / Dataset.manifest_name).exists():
            return Dataset.load(target)
        # Random sessions: what a shop or a news page shows last is new to every model (docs/log.md).
        return cluster_sessions(folder / "raw", out=target, layout=layout, eval_fraction=0.1, eval_sessions="random")

    def jobs(self, cell: Cell, out: Path) -> list[dict[str, Any]]:
        """The baseline and the default run of a cell."""
        config = TrainConfig(
            model=cell.model,
            batch_size=cell.batch_size,
            max_steps=MAX_STEPS[self.options.size],
            seed=self.options.seed,
            threads=1,
            eval_every=max(4, MAX_STEPS[self.options.size] // 20),
        )
        off = TrainConfig.from_overrides({**dict.fromkeys(Switch, "false"), "trial": "false"}, base=config)
        found = []
        for name, layout, own in (("baseline", "time", off), ("default", "auto", config)):
            dataset = self.dataset(cell.data, layout)
            folder = out / name
            folder.mkdir(parents=True)
            profile = profile_access(dataset, out=folder / "profile")
            plan = plan_shards(
                profile,
                out=folder / "plan",
                topology=Topology.local(NUM_RANKS),
                memory_budget_bytes=MEMORY_BUDGET_BYTES,
                hot_budget_bytes="auto" if name == "default" else None,
                strategy="tiers" if name == "default" else "torchrec",
                batch_size=cell.batch_size,
            )
            run = folder / "run"
            run.mkdir()
            job = make_job(dataset.path, out=run, plan=plan.path, allocation=None, nproc=NUM_RANKS, config=own)
            found.append({**lay_out_hot(job, run, own, no_progress), "name": name})
        return found

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Both sides of a cell in all repeats; kept, so that it is measured once."""
        kept = self.work / "cells" / f"{cell.name}.json"
        if kept.exists():
            return dict(json.loads(kept.read_text(encoding="utf-8")))
        with tempfile.TemporaryDirectory(prefix="recmill-cell-") as scratch:
            jobs, result = Path(scratch) / "jobs.json", Path(scratch) / "result.json"
            wanted = {"repeats": REPEATS[self.options.size], "jobs": self.jobs(cell, Path(scratch) / "runs")}
            jobs.write_text(json.dumps(wanted), encoding="utf-8")
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(NUM_RANKS),
            ]
            done = subprocess.run(
                [*command, str(RANK_SCRIPT), str(jobs), str(result)],
                capture_output=True,
                text=True,
                env=rank_environment(1),
            )
            if done.returncode:
                raise SystemExit(f"cell {cell.name} failed:\n{done.stderr[-4000:]}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(result.read_text(encoding="utf-8"), encoding="utf-8")
        return dict(json.loads(kept.read_text(encoding="utf-8")))


def cell_metrics(cell: Cell, found: dict[str, Any]) -> dict[str, Metric]:
    """The three figures of a cell."""
    baseline, ours = found["baseline"], found["default"]
    key = f"{cell.data}_{cell.model}_{cell.batch_size}"
    on = [entry["switch"] for entry in ours[-1]["decisions"] if entry["is_on"]]
    chosen = f"on: {', '.join(on) or 'nothing'}; trial {ours[0]['trial_seconds']:.1f} s"
    rate = compare(
        [run["samples_per_s"] for run in baseline],
        [run["samples_per_s"] for run in ours],
        unit="samples/s",
        note=chosen,
    )
    differences = [own["auc"] - other["auc"] for own, other in zip(ours, baseline, strict=True)]
    auc = plain_value(
        [statistics.fmean(differences)], unit="AUC", note=f"standard error {standard_error(differences):.4f}"
    )
    metrics = {f"rate_{key}": rate, f"auc_{key}": auc}
    target = min(run["auc"] for run in baseline) - TOLERANCE
    curves = [[(entry["seconds"], entry["auc"]) for entry in run["evaluations"]] for run in (*baseline, *ours)]
    seconds = [time_to_auc({"evaluations": curve}, target) for curve in curves]
    if all(value is not None for value in seconds):
        reached = [float(value or 0) for value in seconds]
        half = len(baseline)
        metrics[f"time_{key}"] = compare(reached[:half], reached[half:], unit="s", less_is_better=True)
    return metrics


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def is_lost(cell: Cell, found: dict[str, Any], metrics: dict[str, Metric]) -> bool:
    """Whether the default run is slower than its baseline, or less accurate beyond noise."""
    key = f"{cell.data}_{cell.model}_{cell.batch_size}"
    pairs = zip(found["default"], found["baseline"], strict=True)
    differences = [own["auc"] - other["auc"] for own, other in pairs]
    is_worse = statistics.fmean(differences) < -2 * standard_error(differences)
    return metrics[f"rate_{key}"]["ratio"] < MIN_RATE or is_worse


def table_of(cells: list[tuple[Cell, dict[str, Metric]]]) -> str:
    """All cells as the Markdown table of docs/auto.md."""
    lines = [
        "| data | model | batch | samples/s | time to AUC | AUC difference | on |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell, metrics in cells:
        key = f"{cell.data}_{cell.model}_{cell.batch_size}"
        rate, auc, reached = metrics[f"rate_{key}"], metrics[f"auc_{key}"], metrics.get(f"time_{key}")
        low, high = rate["spread"]["ratio"]
        error, on = auc["note"].rsplit(" ", 1)[1], rate["note"].split(";")[0].removeprefix("on: ")
        shown = f"{reached['ratio']:.2f}x" if reached else "not reached"
        lines.append(
            f"| {cell.data} | {cell.model} | {cell.batch_size:,} | {rate['ratio']:.2f}x ({low:.2f} to {high:.2f}) "
            f"| {shown} | {auc['ours']:+.4f} ± {error} | {on} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch size, 3 repeats, less data")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", default="runs/auto-grid", help="folder of the data and of finished cells")
    parser.add_argument("--cell", action="append", default=[], metavar="DATA-MODEL-BATCH", help="only this cell")
    given = parser.parse_args()
    options = Options(
        benchmark="auto_grid",
        quick=given.quick or given.tiny,
        tiny=given.tiny,
        json_path=given.json,
        seed=given.seed,
    )
    warn_if_busy()
    grid = Grid(options=options, work=Path(given.work) / options.size, chosen=tuple(given.cell))
    metrics: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    measured: list[tuple[Cell, dict[str, Metric]]] = []
    num_lost = 0
    for cell in grid.cells():
        say(cell.name)
        try:
            found = grid.measure(cell)
        except InputError as error:
            skipped[f"rate_{cell.data}_{cell.model}_{cell.batch_size}"] = str(error)
            continue
        own = cell_metrics(cell, found)
        num_lost += is_lost(cell, found, own)
        measured.append((cell, own))
        metrics |= own
    rates = [own["ratio"] for name, own in metrics.items() if name.startswith("rate_")]
    if rates:
        metrics["lowest_rate"] = plain_value([min(rates)], unit="x", note="target: at least 0.97")
        metrics["lost_cells"] = plain_value([float(num_lost)], unit="cells", note=f"of {len(measured)}; target: 0")
        print(table_of(measured))
    finish(options, metrics, skipped=skipped)


if __name__ == "__main__":
    main()
